// Bindings of a shard of the directory, and of the records that it is asked with.

#include "directory/shard.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/entries.h"
#include "cache/holdings.h"
#include "directory/requests.h"
#include "disk/tier.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

const Location* require_locations(const LocationArray& locations, const KeyArray& keys) {
  return reinterpret_cast<const Location*>(
      require<uint8_t>(locations, "locations", {static_cast<int64_t>(keys.shape(0)), sizeof(Location)}));
}

Array<uint8_t> make_put_entries(const KeyArray& keys, const LocationArray& locations, uint64_t sequence) {
  const Key* rows = require_keys(keys);
  const Location* where = require_locations(locations, keys);
  const size_t n = keys.shape(0);
  std::vector<wire::PutEntry> entries(n);
  for (size_t i = 0; i < n; ++i) entries[i] = {rows[i], sequence, where[i]};
  return give<uint8_t>(std::move(entries), {n, sizeof(wire::PutEntry)});
}

Array<uint8_t> make_drop_entries(const KeyArray& keys, const LocationArray& locations, uint64_t sequence) {
  const Key* rows = require_keys(keys);
  const Location* where = require_locations(locations, keys);
  const size_t n = keys.shape(0);
  std::vector<wire::DropEntry> entries(n);
  for (size_t i = 0; i < n; ++i) {
    entries[i] = {rows[i], sequence, where[i].owner, where[i].boot, where[i].generation};
  }
  return give<uint8_t>(std::move(entries), {n, sizeof(wire::DropEntry)});
}

Array<uint8_t> make_check_entries(const KeyArray& keys, const LocationArray& locations) {
  const Key* rows = require_keys(keys);
  const Location* where = require_locations(locations, keys);
  const size_t n = keys.shape(0);
  std::vector<wire::CheckEntry> entries(n);
  for (size_t i = 0; i < n; ++i) entries[i] = {rows[i], mark_of(where[i])};
  return give<uint8_t>(std::move(entries), {n, sizeof(wire::CheckEntry)});
}

// Returns what the server of this shard's node would answer to a whole message, in the node's `boot`.
nb::bytes answer(Shard& self, const nb::bytes& request, uint64_t boot) {
  wire::Reader body({request.c_str(), request.size()});
  const auto header = body.value<wire::Header>();
  if (!header || header->magic != wire::kMagic) throw nb::value_error("a request needs a header");
  const std::string reply = answer_directory_request(self, *header, body, boot);
  return nb::bytes(reply.data(), reply.size());
}

// Of each owner: the location, seconds since it was said, whether it holds still, and whether its owner is in
// the view.
using KnownEntry = std::tuple<nb::bytes, uint32_t, bool, bool>;

std::vector<KnownEntry> known_entries_of(Shard& self, const nb::bytes& id) {
  Key key;
  if (id.size() != sizeof key.bytes) throw nb::value_error("a page's id has 16 bytes");
  std::memcpy(key.bytes, id.c_str(), sizeof key.bytes);
  std::vector<Shard::Known> all;
  {
    const nb::gil_scoped_release unlocked;  // a stripe that grows is locked for long
    all = self.entries_of(key, self.now());
  }
  std::vector<KnownEntry> entries;
  for (const Shard::Known& known : all) {
    entries.emplace_back(nb::bytes(reinterpret_cast<const char*>(&known.location), sizeof known.location),
                         known.age, known.is_live, known.is_counting);
  }
  return entries;
}

using WritableLocations =
    nb::ndarray<uint8_t, nb::shape<-1, sizeof(Location)>, nb::c_contig, nb::device::cpu>;

// As Shard::get; what other holders there are goes to `others`.
void get_with_others(Shard& self, const Key* keys, size_t n, uint8_t* found, Location* locations,
                     OtherHolders* others) {
  std::vector<Location> all;
  self.get_holders(keys, n, kMostHolders, found, &all);
  const Location* next = all.data();
  for (size_t i = 0; i < n; ++i) {
    const size_t n_named = found[i];
    if (n_named > 0) {
      others->put(keys[i], next + 1, n_named - 1);
      locations[i] = *next;
    }
    found[i] = n_named > 0 ? 1 : 0;
    next += n_named;
  }
}

}  // namespace

void bind_shard(nb::module_& m) {
  m.def("put_entries", &make_put_entries, "keys"_a, "locations"_a, "sequence"_a);
  m.def("check_entries", &make_check_entries, "keys"_a, "locations"_a);
  m.def("drop_entries", &make_drop_entries, "keys"_a, "locations"_a, "sequence"_a);
  nb::class_<Shard>(m, "Shard",
                    "The entries of the directory that this node keeps. See native/src/directory/shard.h.")
      .def(nb::init<uint64_t, std::shared_ptr<PageHistory>>(), "max_entries"_a,
           "history"_a.none() = nb::none())
      .def("entries_of", known_entries_of, "id"_a)
      .def(
          "get",
          [](Shard& self, const KeyArray& keys, const std::shared_ptr<OtherHolders>& others) {
            const Key* rows = require_keys(keys);
            const size_t n = keys.shape(0);
            std::vector<uint8_t> found(n);
            std::vector<Location> locations(n);
            {
              nb::gil_scoped_release release;
              if (others == nullptr) {
                self.get(rows, n, found.data(), locations.data());
              } else {
                get_with_others(self, rows, n, found.data(), locations.data(), others.get());
              }
            }
            return std::pair(give<uint8_t>(std::move(found), {n}),
                             give<uint8_t>(std::move(locations), {n, sizeof(Location)}));
          },
          "keys"_a, "others"_a.none() = nb::none())
      .def(
          "put",
          [](Shard& self, const EntryArray<wire::PutEntry>& entries) {
            const auto copies = take_entries<wire::PutEntry>(entries);
            nb::gil_scoped_release release;
            return self.put(copies.data(), copies.size(), self.now());
          },
          "entries"_a)
      .def(
          "drop",
          [](Shard& self, const EntryArray<wire::DropEntry>& entries) {
            const auto copies = take_entries<wire::DropEntry>(entries);
            nb::gil_scoped_release release;
            self.drop(copies.data(), copies.size(), self.now());
          },
          "entries"_a)
      .def(
          "keep_present",
          [](Shard& self, const KeyArray& keys, WritableLocations locations, const FlagArray& found,
             OtherHolders* others) {
            const Key* rows = require_keys(keys);
            const size_t n = keys.shape(0);
            if (locations.shape(0) != n) throw nb::value_error("locations and keys differ in length");
            const auto* there = require<uint8_t>(found, "found", {static_cast<int64_t>(n)});
            std::vector<uint8_t> present(there, there + n);
            auto* where = reinterpret_cast<Location*>(locations.data());
            self.keep_present(where, present.data(), n);
            if (others != nullptr) others->replace_lost(self, rows, there, where, present.data(), n);
            return give<uint8_t>(std::move(present), {n});
          },
          "keys"_a, "locations"_a, "found"_a, "others"_a.none())
      .def(
          "set_view",
          [](Shard& self, const std::vector<uint64_t>& owners, const std::vector<uint64_t>& boots,
             const std::vector<uint64_t>& since, size_t n_away) {
            const size_t n = owners.size();
            if (n != boots.size()) throw nb::value_error("owners and boots differ in length");
            if (!since.empty() && n != since.size())
              throw nb::value_error("owners and since differ in length");
            if (n_away > n) throw nb::value_error("more are away than there are owners");
            std::vector<OwnerLives::Life> lives;
            for (size_t i = 0; i < n; ++i) {
              lives.push_back({owners[i], boots[i], since.empty() ? boots[i] : since[i], i >= n - n_away});
            }
            self.set_view(lives);
          },
          "owners"_a, "boots"_a, "since"_a = std::vector<uint64_t>(), "n_away"_a = 0)
      .def(
          "set_rings",
          [](Shard& self, const std::vector<std::shared_ptr<RingTable>>& rings) {
            // Copies: a thread that answers others may be the last to have them, and to give back what is the
            // interpreter's it would have to wait for it.
            std::vector<std::shared_ptr<const RingTable>> own;
            for (const auto& ring : rings) own.push_back(std::make_shared<const RingTable>(*ring));
            self.set_rings(std::move(own));
          },
          "rings"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "check",
          [](Shard& self, const EntryArray<wire::CheckEntry>& entries) {
            const auto copies = take_entries<wire::CheckEntry>(entries);
            std::vector<uint8_t> kept(copies.size());
            self.check(copies.data(), copies.size(), kept.data());
            return give<uint8_t>(std::move(kept), {copies.size()});
          },
          "entries"_a)
      .def("watch", &Shard::watch, "owner"_a)
      .def(
          "serve_held",
          [](Shard& self, std::shared_ptr<Pool> pool, std::shared_ptr<Guests> guests,
             std::shared_ptr<Tier> tier) {
            if (pool == nullptr) return self.serve_held({});
            Shard::Held behind;
            if (tier != nullptr) {
              behind = [tier = std::move(tier)](const Key* keys, size_t n, uint8_t* found,
                                                Location* locations) {
                tier->locate_at_once(keys, n, found, locations);
              };
            }
            self.serve_held(holdings_of(std::move(pool), std::move(guests), std::move(behind)));
          },
          "pool"_a.none(), "guests"_a.none() = nb::none(), "tier"_a.none() = nb::none())
      .def(
          "take_doubted",
          [](Shard& self, size_t limit) {
            auto keys = self.take_doubted(limit);
            const size_t n = keys.size();
            return give<uint8_t>(std::move(keys), {n, sizeof(Key)});
          },
          "limit"_a)
      .def(
          "take_called",
          [](Shard& self, size_t limit) {
            std::vector<Key> keys;
            std::vector<uint64_t> owners;
            for (const auto& [key, owner] : self.take_called(limit)) {
              keys.push_back(key);
              owners.push_back(owner);
            }
            const size_t n = keys.size();
            return std::pair(give<uint8_t>(std::move(keys), {n, sizeof(Key)}),
                             give<uint64_t>(std::move(owners), {n}));
          },
          "limit"_a)
      .def("confirm_view", [](Shard& self) { self.confirm_view(self.now()); })
      .def("set_time", &Shard::set_time, "seconds"_a)
      .def("sweep", [](Shard& self) { self.sweep(self.now()); })
      .def("answer", &answer, "request"_a, "boot"_a)
      .def("stats", [](Shard& self) -> Counts {
        const auto stats = self.stats();
        nb::dict out;
        out["entries"] = stats.entries;
        out["tombstones"] = stats.tombstones;
        out["nbytes"] = stats.nbytes;
        return out;
      });
}

}  // namespace p2pkv
