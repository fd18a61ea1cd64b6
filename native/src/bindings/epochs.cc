// Bindings of the epochs of namespaces.

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "disk/tier.h"
#include "page/namespace_epochs.h"
#include "pool/pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

using Told = std::pair<nb::bytes, uint64_t>;

Key name_of(const nb::bytes& digest) {
  Key key;
  if (digest.size() != sizeof key.bytes) throw nb::value_error("the digest of a namespace has 16 bytes");
  std::memcpy(key.bytes, digest.c_str(), sizeof key.bytes);
  return key;
}

std::vector<Key> names_of(const std::vector<nb::bytes>& names) {
  std::vector<Key> keys;
  for (const nb::bytes& name : names) keys.push_back(name_of(name));
  return keys;
}

void raise(NamespaceEpochs& self, const std::vector<Told>& told) {
  std::vector<NamespaceEpoch> epochs;
  for (const auto& [name, epoch] : told) epochs.push_back({name_of(name), epoch});
  bool is_taken;
  {
    nb::gil_scoped_release release;
    is_taken = self.raise(epochs.data(), epochs.size());
  }
  if (!is_taken) throw nb::value_error("an epoch is below 2**62");
}

std::vector<Told> all(const NamespaceEpochs& self) {
  std::vector<Told> out;
  for (const NamespaceEpoch& known : self.all()) {
    out.emplace_back(nb::bytes(known.name_space.bytes, sizeof known.name_space.bytes), known.epoch);
  }
  return out;
}

void take_back_from(NamespaceEpochs& self, std::shared_ptr<Pool> pool, std::shared_ptr<Tier> tier) {
  if (pool == nullptr) return self.on_raised(nullptr);
  self.on_raised([pool = std::move(pool), tier = std::move(tier)] {
    if (tier != nullptr) tier->clear();
    pool->purge(PageEvent::kBumped);
    if (tier != nullptr) tier->clear();  // what went from the pool to the disk, or back, between the two
  });
}

void keep_in(NamespaceEpochs& self, std::shared_ptr<Pool> pool) {
  if (pool == nullptr) return self.keep(nullptr);
  self.keep([pool = std::move(pool)](const auto& epochs) { pool->keep_epochs(epochs); });
}

}  // namespace

void bind_epochs(nb::module_& m) {
  nb::class_<NamespaceEpochs>(m, "NamespaceEpochs",
                              "Which pages are of before a bump. See native/src/page/namespace_epochs.h.")
      .def(nb::init<>())
      .def(
          "follow",
          [](NamespaceEpochs& self, const std::vector<nb::bytes>& names) { self.follow(names_of(names)); },
          "names"_a)
      .def(
          "greatest",
          [](const NamespaceEpochs& self, const std::vector<nb::bytes>& names) {
            return self.greatest(names_of(names));
          },
          "names"_a)
      .def("take_back_from", take_back_from, "pool"_a.none(), "tier"_a.none(),
           nb::call_guard<nb::gil_scoped_release>())
      .def("keep_in", keep_in, "pool"_a.none(), nb::call_guard<nb::gil_scoped_release>())
      .def("raise_to", raise, "told"_a)
      .def(
          "keep_vigil",
          [](NamespaceEpochs& self, double seconds) {
            self.vigil().keep(static_cast<int64_t>(seconds * 1e9));
          },
          "seconds"_a)
      .def("was_given_up", [](NamespaceEpochs& self) { self.vigil().was_given_up(); })
      .def_prop_ro("n_sleeps", [](NamespaceEpochs& self) { return self.vigil().n_sleeps(); })
      .def(
          "caught_up", [](NamespaceEpochs& self, uint64_t n_sleeps) { self.vigil().caught_up(n_sleeps); },
          "n_sleeps"_a)
      .def(
          "guests_caught_up",
          [](NamespaceEpochs& self, uint64_t n_sleeps) { self.vigil().guests_caught_up(n_sleeps); },
          "n_sleeps"_a)
      .def("all", all)
      .def_prop_ro("own", &NamespaceEpochs::own)
      .def_prop_ro("version", &NamespaceEpochs::version)
      .def_prop_ro("n_raised", &NamespaceEpochs::n_raised)
      .def_ro_static("END", &NamespaceEpochs::kEnd)
      .def_ro_static("MOST", &NamespaceEpochs::kMost);
}

}  // namespace p2pkv
