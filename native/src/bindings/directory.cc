// Bindings of the directory: the shard, and what asking its owners takes per key.

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <utility>

#include "arrays.h"
#include "bindings.h"
#include "p2pkv/ask_batch.h"
#include "p2pkv/control_loop.h"
#include "p2pkv/shard.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

void bind_shard(nb::module_& m) {
  nb::class_<Shard>(m, "Shard")
      .def(nb::init<uint64_t>(), "max_entries"_a)
      .def(
          "get",
          [](Shard& self, const AnyArray& keys) {
            const Key* rows = require_keys(keys);
            const size_t n = keys.shape(0);
            std::vector<uint8_t> found(n);
            std::vector<Location> locations(n);
            {
              nb::gil_scoped_release release;
              self.get(rows, n, found.data(), locations.data());
            }
            return nb::make_tuple(give<uint8_t>(std::move(found), {n}),
                                  give<uint8_t>(std::move(locations), {n, sizeof(Location)}));
          },
          "keys"_a)
      .def(
          "put",
          [](Shard& self, const nb::bytes& entries) {
            if (entries.size() % sizeof(wire::PutEntry) != 0)
              throw nb::value_error("entries have a wrong length");
            std::vector<wire::PutEntry> copies(entries.size() / sizeof(wire::PutEntry));
            std::memcpy(static_cast<void*>(copies.data()), entries.c_str(), entries.size());
            nb::gil_scoped_release release;
            return self.put(copies.data(), copies.size(), steady_seconds());
          },
          "entries"_a)
      .def(
          "drop",
          [](Shard& self, const nb::bytes& entries) {
            if (entries.size() % sizeof(wire::DropEntry) != 0)
              throw nb::value_error("entries have a wrong length");
            std::vector<wire::DropEntry> copies(entries.size() / sizeof(wire::DropEntry));
            std::memcpy(static_cast<void*>(copies.data()), entries.c_str(), entries.size());
            nb::gil_scoped_release release;
            self.drop(copies.data(), copies.size(), steady_seconds());
          },
          "entries"_a)
      .def(
          "keep_present",
          [](Shard& self, const AnyArray& locations, const AnyArray& found) {
            const auto* where = reinterpret_cast<const Location*>(
                require<uint8_t>(locations, "locations", {kAnySize, static_cast<int64_t>(sizeof(Location))}));
            const size_t n = locations.shape(0);
            const auto* there = require<uint8_t>(found, "found", {static_cast<int64_t>(n)});
            std::vector<uint8_t> present(there, there + n);
            self.keep_present(where, present.data(), n);
            return give<uint8_t>(std::move(present), {n});
          },
          "locations"_a, "found"_a)
      .def(
          "set_view",
          [](Shard& self, const std::vector<uint64_t>& owners, const std::vector<uint64_t>& boots) {
            if (owners.size() != boots.size()) throw nb::value_error("owners and boots differ in length");
            self.set_view(owners.data(), boots.data(), owners.size());
          },
          "owners"_a, "boots"_a)
      .def("stats", [](Shard& self) {
        const auto stats = self.stats();
        nb::dict out;
        out["entries"] = stats.entries;
        out["tombstones"] = stats.tombstones;
        out["nbytes"] = stats.nbytes;
        return out;
      });
}

void make_ring(RingTable* self, const AnyArray& points, const AnyArray& successors,
               const AnyArray& is_healthy, int32_t own_index) {
  const auto* sorted = require<uint64_t>(points, "points", {kAnySize});
  const size_t n = points.shape(0);
  const auto* owners = require<int32_t>(successors, "successors", {static_cast<int64_t>(n), kAnySize});
  const size_t replicas = successors.shape(1);
  const auto* healthy = require<uint8_t>(is_healthy, "is_healthy", {kAnySize});
  const size_t n_members = is_healthy.shape(0);
  for (size_t i = 0; i < n * replicas; ++i) {
    if (owners[i] >= static_cast<int32_t>(n_members))
      throw nb::value_error("successors name an unknown member");
  }
  new (self) RingTable{{sorted, sorted + n},
                       {owners, owners + n * replicas},
                       replicas,
                       {healthy, healthy + n_members},
                       own_index};
}

void make_ask(AskBatch* self, const AnyArray& keys, nb::object is_done, std::shared_ptr<RingTable> ring) {
  const Key* rows = require_keys(keys);
  const size_t n = keys.shape(0);
  const uint8_t* done = nullptr;
  if (!is_done.is_none()) {
    done = require<uint8_t>(nb::cast<AnyArray>(is_done), "is_done", {static_cast<int64_t>(n)});
  }
  new (self) AskBatch(rows, n, done, std::move(ring));
}

nb::bytes body_of(const AskBatch& self, size_t ask, const AnyArray& records) {
  const auto* bytes = require<uint8_t>(records, "records", {kAnySize, kAnySize});
  if (records.shape(0) != self.answered().size()) throw nb::value_error("records and keys differ in length");
  const std::string body = self.body(ask, bytes, records.shape(1));
  return nb::bytes(body.data(), body.size());
}

// `found` and `locations` are written: they are the arrays that Shard.get returned.
bool take_found(
    AskBatch& self, size_t ask, const nb::bytes& reply,
    nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> found,
    nb::ndarray<uint8_t, nb::shape<-1, sizeof(Location)>, nb::c_contig, nb::device::cpu> locations) {
  if (found.shape(0) != self.answered().size() || locations.shape(0) != found.shape(0)) {
    throw nb::value_error("found, locations and keys differ in length");
  }
  return self.take_found(ask, {reply.c_str(), reply.size()}, found.data(),
                         reinterpret_cast<Location*>(locations.data()));
}

void bind_ask(nb::module_& m) {
  nb::class_<RingTable>(m, "RingTable")
      .def("__init__", &make_ring, "points"_a, "successors"_a, "is_healthy"_a, "own_index"_a);
  nb::class_<AskBatch>(m, "AskBatch")
      .def("__init__", &make_ask, "keys"_a, "is_done"_a.none(), "ring"_a)
      .def("asks",
           [](const AskBatch& self) {
             nb::list out;
             for (const AskBatch::Ask& ask : self.asks())
               out.append(nb::make_tuple(ask.owner, ask.rows.size()));
             return out;
           })
      .def("body", &body_of, "ask"_a, "records"_a)
      .def("acknowledge", &AskBatch::acknowledge, "ask"_a)
      .def("take_found", &take_found, "ask"_a, "reply"_a, "found"_a, "locations"_a)
      .def("refuse", &AskBatch::refuse, "ask"_a)
      .def("is_settled", &AskBatch::is_settled)
      .def("is_heard", &AskBatch::is_heard)
      .def("answered",
           [](const AskBatch& self) {
             std::vector<uint8_t> answered = self.answered();
             const size_t n = answered.size();
             return give<uint8_t>(std::move(answered), {n});
           })
      .def("silent",
           [](const AskBatch& self) {
             std::vector<int32_t> owners;
             for (const AskBatch::Ask& ask : self.asks()) {
               if (!ask.is_answered) owners.push_back(ask.owner);
             }
             return owners;
           })
      .def("passed_over", &AskBatch::passed_over);
}

}  // namespace

void bind_directory(nb::module_& m) {
  bind_shard(m);
  bind_ask(m);
}

}  // namespace p2pkv
