// Pool, LocationCache and checksums. Every batch call releases the GIL for as long as it works.
#include "pool/pool.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

#include "base/checksum.h"
#include "base/copy.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/page_batch.h"
#include "cache/location_cache.h"
#include "cuda/lifting.h"
#include "pool/mapped_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

using Bytes = Array<uint8_t>;

Bytes give_locations(std::vector<Location> locations) {
  const size_t n = locations.size();
  return give<uint8_t>(std::move(locations), {n, sizeof(Location)});
}

std::shared_ptr<Pool> create_pool(uint64_t nbytes, uint32_t granule, uint64_t owner, uint64_t boot,
                                  uint32_t region, bool has_disk, uint64_t pinned_limit,
                                  size_t evictions_kept, size_t huge_page, bool prefault_behind,
                                  uint8_t packing, std::shared_ptr<ChangeLog> changes, bool is_kept,
                                  std::optional<std::pair<int, int>> left, WriterLock* lock, bool is_shown) {
  PoolOptions options{};
  options.nbytes = nbytes;
  options.granule = granule;
  options.owner = owner;
  options.boot = boot;
  options.region = region;
  options.has_disk = has_disk;
  options.pinned_limit = pinned_limit;
  options.evictions_kept = evictions_kept;
  options.changes = std::move(changes);
  options.memory = {huge_page, prefault_behind, is_kept};
  options.is_shown = is_shown;
  if (left && lock == nullptr) throw nb::value_error("memory that was left needs its lock");
  if (packing > static_cast<uint8_t>(Packing::kAuto)) throw nb::value_error("packing is 0, 1 or 2");
  options.packing = static_cast<Packing>(packing);
  std::string error;
  std::shared_ptr<Pool> pool;
  {
    const nb::gil_scoped_release unlocked;
    pool = left ? Pool::adopt(options, left->first, left->second, std::move(*lock), &error)
                : Pool::create(options, &error);
  }
  if (!pool) throw nb::value_error(error.c_str());
  return pool;
}

// Beside statuses and locations: how many pages can be read now, and the bytes that were copied.
std::tuple<Bytes, Bytes, size_t, uint64_t> publish(Pool& pool, const KeyArray& keys, const PieceArray& pieces,
                                                   double timeout, cuda::Lifting* lifting) {
  const PageBatch batch = require_batch(&keys, pieces);
  if (lifting != nullptr && (lifting->n_pages() != batch.n_pages || !pool.takes_given()))
    throw nb::value_error("the pool takes no pages of devices, or not so many of these");
  std::vector<PoolStatus> statuses(batch.n_pages);
  std::vector<Location> locations(batch.n_pages);
  {
    const nb::gil_scoped_release unlocked;
    pool.publish(batch, statuses.data(), locations.data(), Deadline::after(timeout), nullptr, {}, lifting);
  }
  size_t n_there = 0;
  uint64_t stored_bytes = 0;
  for (size_t i = 0; i < batch.n_pages; ++i) {
    if (statuses[i] == PoolStatus::kStored || statuses[i] == PoolStatus::kExists) ++n_there;
    if (statuses[i] == PoolStatus::kStored) stored_bytes += locations[i].length;
  }
  return {give<uint8_t>(std::move(statuses), {batch.n_pages}), give_locations(std::move(locations)), n_there,
          stored_bytes};
}

Bytes fetch(Pool& pool, const KeyArray& keys, const PieceArray& pieces) {
  const PageBatch batch = require_batch(&keys, pieces);
  std::vector<FetchStatus> statuses(batch.n_pages);
  {
    const nb::gil_scoped_release unlocked;
    pool.fetch(batch, statuses.data());
  }
  return give<uint8_t>(std::move(statuses), {batch.n_pages});
}

// For the calls that take keys and say which were found and where: look-ups of pool and cache, and retract.
template <typename Owner, auto method>
std::pair<Bytes, Bytes> find(Owner& owner, const KeyArray& keys) {
  const Key* data = require_keys(keys);
  const size_t n = keys.shape(0);
  std::vector<uint8_t> found(n);
  std::vector<Location> locations(n);
  {
    const nb::gil_scoped_release unlocked;
    (owner.*method)(data, n, found.data(), locations.data());
  }
  return {give<uint8_t>(std::move(found), {n}), give_locations(std::move(locations))};
}

std::pair<Bytes, Bytes> lookup(Pool& pool, const KeyArray& keys) {
  return find<Pool, &Pool::lookup>(pool, keys);
}

std::pair<Bytes, Bytes> retract(Pool& pool, const KeyArray& keys) {
  return find<Pool, &Pool::retract>(pool, keys);
}

std::pair<Bytes, Bytes> get(LocationCache& cache, const KeyArray& keys) {
  return find<LocationCache, &LocationCache::get>(cache, keys);
}

void touch(Pool& pool, const KeyArray& keys) {
  const Key* data = require_keys(keys);
  const size_t n = keys.shape(0);
  const nb::gil_scoped_release unlocked;
  pool.touch(data, n);
}

std::tuple<Bytes, Array<uint64_t>, Bytes> pin(Pool& pool, const KeyArray& keys, double lease_seconds,
                                              uint64_t most_bytes) {
  const Key* data = require_keys(keys);
  const size_t n = keys.shape(0);
  std::vector<uint8_t> found(n);
  std::vector<uint64_t> tickets(n);
  std::vector<Location> locations(n);
  {
    const nb::gil_scoped_release unlocked;
    pool.pin(data, n, lease_seconds, found.data(), tickets.data(), locations.data(), most_bytes);
  }
  return {give<uint8_t>(std::move(found), {n}), give<uint64_t>(std::move(tickets), {n}),
          give_locations(std::move(locations))};
}

Bytes unpin(Pool& pool, const ArrayOf<uint64_t, kAnySize>& tickets) {
  const auto* data = require<uint64_t>(tickets, "tickets", {kAnySize});
  const size_t n = tickets.shape(0);
  std::vector<uint8_t> held(n);
  {
    const nb::gil_scoped_release unlocked;
    pool.unpin(data, n, held.data());
  }
  return give<uint8_t>(std::move(held), {n});
}

uint64_t pinned_nbytes(Pool& pool, const ArrayOf<uint64_t, kAnySize>& tickets) {
  const auto* data = require<uint64_t>(tickets, "tickets", {kAnySize});
  const size_t n = tickets.shape(0);
  const nb::gil_scoped_release unlocked;
  return pool.pinned_nbytes(data, n);
}

std::pair<Bytes, Bytes> give_pages(const std::vector<Eviction>& pages) {
  std::vector<Key> keys;
  std::vector<Location> locations;
  keys.reserve(pages.size());
  locations.reserve(pages.size());
  for (const Eviction& page : pages) {
    keys.push_back(page.key);
    locations.push_back(page.location);
  }
  return {give<uint8_t>(std::move(keys), {pages.size(), sizeof(Key)}), give_locations(std::move(locations))};
}

std::pair<Bytes, Bytes> drain_evicted(Pool& pool, size_t limit, double timeout, double gather) {
  std::vector<Eviction> pages;
  {
    const nb::gil_scoped_release unlocked;
    pages = pool.drain_evicted(limit, timeout, gather);
  }
  return give_pages(pages);
}

std::tuple<Bytes, Bytes, uint64_t> list(Pool& pool, uint64_t cursor, size_t limit) {
  if (limit == 0) throw nb::value_error("limit must be positive");
  std::vector<Eviction> pages;
  uint64_t next;
  {
    const nb::gil_scoped_release unlocked;
    next = pool.list(cursor, limit, &pages);
  }
  auto [keys, locations] = give_pages(pages);
  return {keys, locations, next};
}

// Rows of 32 bytes: key, stamp, length.
std::pair<Bytes, uint64_t> list_uses(Pool& pool, uint64_t cursor, size_t limit) {
  if (limit == 0) throw nb::value_error("limit must be positive");
  std::vector<PageUse> pages;
  uint64_t next;
  {
    const nb::gil_scoped_release unlocked;
    next = pool.list_uses(cursor, limit, &pages);
  }
  const size_t n = pages.size();
  return {give<uint8_t>(std::move(pages), {n, sizeof(PageUse)}), next};
}

Counts stats_of_pool(Pool& pool) {
  PoolStats stats;
  ShareStats of_shares;
  {
    const nb::gil_scoped_release unlocked;
    stats = pool.stats();
    of_shares = pool.share_stats();
  }
  nb::dict named;
  named["capacity"] = stats.capacity;
  named["used"] = stats.used;
  named["pages"] = stats.pages;
  named["pinned_bytes"] = stats.pinned_bytes;
  named["stored_pages"] = stats.stored_pages;
  named["evicted_pages"] = stats.evicted_pages;
  named["no_room_pages"] = stats.no_room_pages;
  named["dropped_evictions"] = stats.dropped_evictions;
  named["tried_pages"] = stats.packed.n_tried;
  named["packed_pages"] = stats.packed.n_packed;
  named["tried_bytes"] = stats.packed.tried_bytes;
  named["tried_stored_bytes"] = stats.packed.stored_bytes;
  named["packing_nanoseconds"] = stats.packed.nanoseconds;
  named["is_packing"] = stats.packed.is_on ? 1 : 0;
  named["untold_evictions"] = stats.untold_evictions;
  named["guest_hits"] = stats.guest_hits;
  named["outgrown_pages"] = of_shares.outgrown_pages;
  return named;
}

std::vector<std::pair<nb::bytes, uint64_t>> first_epochs(const Pool& pool) {
  std::vector<std::pair<nb::bytes, uint64_t>> out;
  for (const NamespaceEpoch& known : pool.first_epochs()) {
    out.emplace_back(nb::bytes(known.name_space.bytes, sizeof known.name_space.bytes), known.epoch);
  }
  return out;
}

// The id of the page that is evicted next, if there is a page.
std::optional<nb::bytes> oldest(Pool& pool) {
  std::vector<Key> keys;
  {
    const nb::gil_scoped_release unlocked;
    pool.list_oldest(1, UINT64_MAX, &keys);
  }
  if (keys.empty()) return std::nullopt;
  return nb::bytes(reinterpret_cast<const char*>(keys.front().bytes), sizeof keys.front().bytes);
}

Array<uint64_t> checksum_pages(const PieceArray& pieces) {
  const PageBatch batch = require_batch(nullptr, pieces);
  std::vector<uint64_t> sums(batch.n_pages);
  {
    const nb::gil_scoped_release unlocked;
    for (size_t i = 0; i < batch.n_pages; ++i) {
      Checksum sum;
      for (size_t k = 0; k < batch.n_pieces; ++k) {
        const Piece& piece = batch.pieces[i * batch.n_pieces + k];
        sum.update(reinterpret_cast<const void*>(piece.address), static_cast<size_t>(piece.nbytes));
      }
      sums[i] = sum.finish();
    }
  }
  return give<uint64_t>(std::move(sums), {batch.n_pages});
}

void put(LocationCache& cache, const KeyArray& keys, const LocationArray& locations) {
  const Key* data = require_keys(keys);
  const auto n = static_cast<int64_t>(keys.shape(0));
  const auto* values = require<uint8_t>(locations, "locations", {n, sizeof(Location)});
  const nb::gil_scoped_release unlocked;
  cache.put(data, reinterpret_cast<const Location*>(values), static_cast<size_t>(n));
}

void drop(LocationCache& cache, const KeyArray& keys) {
  const Key* data = require_keys(keys);
  const size_t n = keys.shape(0);
  const nb::gil_scoped_release unlocked;
  cache.drop(data, n);
}

// A row a copy: the address to copy to, the address to copy from, and the bytes.
void copy_pieces(const ArrayOf<int64_t, kAnySize, 3>& copies) {
  const int64_t* rows = require<int64_t>(copies, "copies", {kAnySize, 3});
  const size_t n = copies.shape(0);
  for (size_t i = 0; i < n; ++i) {
    if (rows[3 * i + 2] < 0) throw nb::value_error("copies must not have negative lengths");
  }
  const nb::gil_scoped_release unlocked;
  for (size_t i = 0; i < n; ++i) {
    const int64_t* copy = rows + 3 * i;
    copy_bytes(reinterpret_cast<void*>(copy[0]), reinterpret_cast<const void*>(copy[1]),
               static_cast<size_t>(copy[2]));
  }
}

void bind_checksum(nb::module_& m) {
  m.def(
      "checksum",
      [](uintptr_t address, size_t nbytes) {
        return checksum(reinterpret_cast<const void*>(address), nbytes);
      },
      "address"_a, "nbytes"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("checksum_pages", checksum_pages, "pieces"_a.noconvert());
  m.def("packing_kernel", codec::kernel_name);
  m.def("copy_pieces", copy_pieces, "copies"_a.noconvert());
}

void bind_location_cache(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<LocationCache>(m, "LocationCache",
                            "Locations that this node was told lately, each for ``ttl`` seconds. See "
                            "native/src/cache/location_cache.h.")
      .def(nb::init<size_t, double>(), "capacity"_a, "ttl"_a)
      .def("put", put, "keys"_a.noconvert(), "locations"_a.noconvert())
      .def("get", get, "keys"_a.noconvert())
      .def("drop", drop, "keys"_a.noconvert())
      .def("drop_owner", &LocationCache::drop_owner, "owner"_a, Released())
      .def("__len__", &LocationCache::size, Released());
}

}  // namespace

void bind_pool(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Pool>(m, "Pool", "Pages in one region of memory. See p2pkv/pool.py.")
      .def(nb::new_(&create_pool), "nbytes"_a, nb::kw_only(), "granule"_a = 4096, "owner"_a = 0, "boot"_a = 0,
           "region"_a = 0, "has_disk"_a = false, "pinned_limit"_a = 0, "evictions_kept"_a = 65536,
           "huge_page"_a = 0, "prefault_behind"_a = false, "packing"_a = 0, "changes"_a.none() = nb::none(),
           "is_kept"_a = false, "left"_a.none() = nb::none(), "lock"_a.none() = nb::none(),
           "is_shown"_a = false)
      .def("set_boot", &Pool::set_boot, "boot"_a)
      .def("publish", publish, "keys"_a.noconvert(), "pieces"_a.noconvert(), "timeout"_a = kNoHurry,
           "lifting"_a.none() = nb::none())
      .def_prop_ro("takes_given", &Pool::takes_given)
      .def("fetch", fetch, "keys"_a.noconvert(), "pieces"_a.noconvert())
      .def("lookup", lookup, "keys"_a.noconvert())
      .def("pin", pin, "keys"_a.noconvert(), "lease_seconds"_a, "most_bytes"_a = UINT64_MAX)
      .def("pinned_nbytes", pinned_nbytes, "tickets"_a.noconvert())
      .def("unpin", unpin, "tickets"_a.noconvert())
      .def("touch", touch, "keys"_a.noconvert())
      .def("retract", retract, "keys"_a.noconvert())
      .def(
          "purge", [](Pool& pool) { return pool.purge(); }, Released())
      .def("list", list, "cursor"_a, "limit"_a)
      .def("list_uses", list_uses, "cursor"_a, "limit"_a)
      .def("drain_evicted", drain_evicted, "limit"_a, "timeout"_a, "gather"_a = 0.0)
      .def("wake_drainer", &Pool::wake_drainer)
      .def("close", &Pool::close, Released())
      .def("release_memory", &Pool::release_memory, Released())
      .def("leave_memory", &Pool::leave_memory, Released())
      .def("map_behind", &Pool::map_behind, Released())
      .def(
          "keep_boots", [](Pool& self, uint64_t since, uint64_t last) { self.keep_boots({since, last}); },
          "since"_a, "last"_a)
      .def("first_boots",
           [](const Pool& self) {
             const KeptBoots boots = self.first_boots();
             return std::pair(boots.since, boots.last);
           })
      .def("first_epochs", first_epochs,
           nb::sig("def first_epochs(self) -> collections.abc.Sequence[tuple[bytes, int]]"))
      .def_prop_ro("records_fd", &Pool::records_fd)
      .def("stats", stats_of_pool)
      .def("oldest", oldest)
      .def_prop_ro("address", [](Pool& pool) { return reinterpret_cast<uintptr_t>(pool.region().base()); })
      .def_prop_ro("nbytes", [](Pool& pool) { return pool.region().nbytes(); })
      .def_prop_ro("data_nbytes", &Pool::data_nbytes)
      .def_prop_ro("fd", [](Pool& pool) { return pool.region().fd(); })
      .def_prop_ro("granule", &Pool::granule)
      .def_prop_ro("words_offset", [](Pool&) { return 0; })
      .def_prop_ro("data_offset", &Pool::data_offset);
  nb::class_<MappedPool>(
      m, "MappedPool",
      "The pool of this host's node, as an engine maps it. See native/src/pool/mapped_pool.h.")
      .def("map_in", [](MappedPool& pool) { pool.region()->map_in(); })
      .def_prop_ro("boot", &MappedPool::boot)
      .def_prop_ro("are_guests_believed", &MappedPool::are_guests_believed)
      .def_prop_ro("is_kept", &MappedPool::is_kept);
  nb::class_<CurrentMappedPool>(m, "CurrentMappedPool", "Holds the mapped pool of this moment, or none.")
      .def(nb::init<>())
      .def("lookup", find<CurrentMappedPool, &CurrentMappedPool::lookup>, "keys"_a.noconvert())
      .def("lookup_own", find<CurrentMappedPool, &CurrentMappedPool::lookup_own>, "keys"_a.noconvert())
      .def("set_member", &CurrentMappedPool::set_member, "is_member"_a)
      .def("set", &CurrentMappedPool::set, "pool"_a.none(), Released())
      .def("get", &CurrentMappedPool::get, nb::sig("def get(self) -> MappedPool | None"));
  bind_location_cache(m);
  bind_checksum(m);
}

}  // namespace p2pkv
