// Bindings of the pages of other nodes in a pool.

#include "pool/guests.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

using Bytes = Array<uint8_t>;
using AddressArray = ArrayOf<int64_t, kAnySize>;
using OriginArray = ArrayOf<uint64_t, kAnySize, 3>;

// Statuses, and the locations with those of the stored pages in their places.
std::pair<Bytes, Bytes> store(Guests& self, const KeyArray& keys, const AddressArray& addresses,
                              const OriginArray& origins, const LocationArray& locations, uint64_t epoch) {
  const Key* data = require_keys(keys);
  const auto n = static_cast<int64_t>(keys.shape(0));
  const auto* from = require<int64_t>(addresses, "addresses", {n});
  const auto* read = require<uint64_t>(origins, "origins", {n, 3});
  const auto* raw = require<uint8_t>(locations, "locations", {n, sizeof(Location)});
  const size_t count = keys.shape(0);
  std::vector<Location> where(count);
  std::vector<Origin> of(count);
  if (count > 0) {
    std::memcpy(static_cast<void*>(where.data()), raw, count * sizeof(Location));
    std::memcpy(static_cast<void*>(of.data()), read, count * sizeof(Origin));
  }
  std::vector<StoreStatus> statuses(count);
  {
    const nb::gil_scoped_release unlocked;
    self.store(data, from, of.data(), count, epoch, where.data(), statuses.data());
  }
  return {give<uint8_t>(std::move(statuses), {count}),
          give<uint8_t>(std::move(where), {count, sizeof(Location)})};
}

Bytes adopt(Guests& self, uint64_t source, uint64_t log, uint64_t number) {
  std::vector<Key> keys;
  {
    const nb::gil_scoped_release unlocked;
    self.adopt(source, {log, number}, &keys);
  }
  const size_t n = keys.size();
  return give<uint8_t>(std::move(keys), {n, sizeof(Key)});
}

size_t take_out(Guests& self, const KeyArray& keys) {
  const Key* data = require_keys(keys);
  const size_t n = keys.shape(0);
  const nb::gil_scoped_release unlocked;
  return self.take_out(data, n);
}

size_t evict(Guests& self, const KeyArray& keys) {
  const Key* data = require_keys(keys);
  const size_t n = keys.shape(0);
  const nb::gil_scoped_release unlocked;
  return self.evict(data, n);
}

Counts stats(Guests& self) {
  Guests::Stats stats;
  {
    const nb::gil_scoped_release unlocked;
    stats = self.stats();
  }
  nb::dict named;
  named["pages"] = stats.pages;
  named["taken_back"] = stats.n_taken_back;
  named["sources_lost"] = stats.n_sources_lost;
  return named;
}

}  // namespace

void bind_guests(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Guests>(m, "Guests",
                     "Pages of other nodes in a pool, and who has pages of this one. See "
                     "native/src/pool/guests.h.")
      .def(nb::init<std::shared_ptr<Pool>, std::shared_ptr<NamespaceEpochs>>(), "pool"_a, "epochs"_a)
      .def(
          "count_taken_back",
          [](Guests& self) {
            const TakenBack known = self.count_taken_back();
            return std::pair(known.log, known.number);
          },
          Released())
      .def(
          "taken_back",
          [](Guests& self) {
            const TakenBack known = self.taken_back();
            return std::pair(known.log, known.number);
          },
          Released())
      .def("followers", &Guests::followers, Released())
      .def("forget_absent", &Guests::forget_absent, "members"_a, "now_ns"_a, Released())
      .def(
          "followed",
          [](Guests& self, uint64_t source, uint64_t log, uint64_t number, bool was_out_of_touch) {
            self.followed(source, {log, number}, was_out_of_touch);
          },
          "source"_a, "log"_a, "number"_a, "was_out_of_touch"_a = false, Released())
      .def("is_going", &Guests::is_going, Released())
      .def("store", store, "keys"_a.noconvert(), "addresses"_a.noconvert(), "origins"_a.noconvert(),
           "locations"_a.noconvert(), "epoch"_a)
      .def("adopt", adopt, "source"_a, "log"_a, "number"_a)
      .def("take_out", take_out, "keys"_a.noconvert())
      .def("evict", evict, "keys"_a.noconvert())
      .def("take_out_all", &Guests::take_out_all, Released())
      .def("sources", &Guests::sources, Released())
      .def("stats", stats);
}

}  // namespace p2pkv
