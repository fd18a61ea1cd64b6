// Binding of a publish that tells the directory. The GIL is released for all of it.
#include "cache/publishing.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/page_batch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

void make_publishing(Publishing* self, std::shared_ptr<RingTable> ring, const std::vector<int32_t>& owners,
                     const std::vector<std::shared_ptr<DirectoryChannel>>& channels) {
  if (owners.size() != channels.size()) throw nb::value_error("owners and channels differ in length");
  std::vector<DirectoryLine> lines;
  for (size_t i = 0; i < owners.size(); ++i) lines.push_back({owners[i], channels[i]});
  new (self) Publishing(std::move(ring), std::move(lines));
}

std::vector<bool> as_flags(const std::vector<uint8_t>& flags) {
  return {flags.begin(), flags.end()};
}

// Returns the pages that can be read now, the bytes that were copied, the pages that there was no time for,
// and those that changed meanwhile. With `patience` it takes the answers as well, and returns which channels
// can be used again; else None.
std::tuple<size_t, uint64_t, size_t, size_t, std::optional<std::vector<bool>>> run(
    Publishing& self, Pool& pool, const KeyArray& keys, const PieceArray& pieces, Shard& own,
    Sequences& sequences, Tier* tier, double timeout, std::optional<double> patience) {
  const PageBatch batch = require_batch(&keys, pieces);
  std::optional<std::vector<bool>> is_usable;
  {
    const nb::gil_scoped_release release;
    const Deadline deadline = Deadline::after(timeout);
    self.run(pool, batch, own, sequences, tier, deadline);
    if (patience) {
      const Deadline patient = Deadline::after(*patience);
      self.wait(deadline, patient);
      is_usable = as_flags(self.end(patient));
    }
  }
  return {self.n_readable(), self.stored_bytes(), self.n_late(), self.n_changed(), is_usable};
}

void wait_published(Publishing& self, double timeout, double patience) {
  nb::gil_scoped_release release;
  self.wait(Deadline::after(timeout), Deadline::after(patience));
}

std::vector<bool> end(Publishing& self, double patience) {
  return as_flags(self.end(Deadline::after(patience)));
}

Array<uint8_t> entries_of(const Publishing& self) {
  return give<uint8_t>(std::vector<wire::PutEntry>(self.entries()),
                       {self.entries().size(), sizeof(wire::PutEntry)});
}

}  // namespace

void bind_publishing(nb::module_& m) {
  nb::class_<Publishing>(m, "Publishing",
                         "A publish that tells the directory. See native/src/cache/publishing.h.")
      .def("__init__", &make_publishing, "ring"_a, "owners"_a, "channels"_a)
      .def("run", &run, "pool"_a, "keys"_a.noconvert(), "pieces"_a.noconvert(), "shard"_a, "sequences"_a,
           "tier"_a.none(), "timeout"_a, "patience"_a.none())
      .def("wait", &wait_published, "timeout"_a, "patience"_a)
      .def("is_waiting", &Publishing::is_waiting)
      .def("end", &end, "patience"_a)
      .def("has_lost", &Publishing::has_lost, "pool"_a)
      .def("entries", &entries_of)
      .def_prop_ro("ask", &Publishing::asked, nb::rv_policy::reference_internal);
}

}  // namespace p2pkv
