// The disk store and the faults its tests inject. Every batch call releases the GIL for as long as it works.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <deque>
#include <mutex>
#include <tuple>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/bound_store.h"
#include "disk/faulty_files.h"
#include "disk/folder.h"
#include "disk/store.h"
#include "disk/waiting.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

using disk::CatalogEntry;
using disk::DiskHealth;
using disk::DiskIdentity;
using disk::DiskOptions;
using disk::DiskStore;
using disk::FaultyFiles;
using disk::FileCall;
using disk::ReadStatus;
using Bytes = Array<uint8_t>;

BoundStore* open(const std::string& path, const DiskIdentity& identity, DiskOptions& options,
                 const std::shared_ptr<FaultyFiles>& faults) {
  auto bound = std::make_unique<BoundStore>();
  bound->faults = faults;
  if (faults) options.files = faults.get();
  // the hooks go with the options: a store whose disk hangs outlives the Python object
  options.release = [released = bound->released, faults](const uint64_t* tickets, size_t n) {
    released->push(tickets, n);
  };
  options.stored = [news = bound->news](const Key* keys, size_t n) { news->tell(keys, n); };
  options.changed = [news = bound->news] { news->tell(); };
  std::string error;
  {
    const nb::gil_scoped_release unlocked;
    bound->store = DiskStore::open(path, identity, options, &error);
  }
  if (!bound->store) throw nb::value_error(error.c_str());
  return bound.release();
}

const Piece* require_pages(const ArrayOf<int64_t, kAnySize, 2>& pages, size_t n) {
  const auto* values = require<int64_t>(pages, "pages", {static_cast<int64_t>(n), 2});
  for (size_t i = 0; i < n; ++i) {
    if (values[2 * i + 1] < 0) throw nb::value_error("pages must not have negative lengths");
  }
  return reinterpret_cast<const Piece*>(values);
}

Bytes write(BoundStore& bound, const KeyArray& keys, const ArrayOf<int64_t, kAnySize, 2>& pages,
            const ArrayOf<uint64_t, kAnySize>& checksums, const ArrayOf<uint64_t, kAnySize>& tickets,
            const std::optional<ArrayOf<uint64_t, kAnySize>>& lengths_of_packed) {
  const Key* data = require_keys(keys);
  const size_t n = keys.shape(0);
  const Piece* const pieces = require_pages(pages, n);
  std::vector<uint64_t> lengths;
  for (size_t i = 0; i < n; ++i) lengths.push_back(static_cast<uint64_t>(pieces[i].nbytes));
  if (lengths_of_packed) {
    const auto* given = require<uint64_t>(*lengths_of_packed, "lengths", {static_cast<int64_t>(n)});
    lengths.assign(given, given + n);
  }
  const disk::WriteBatch batch{n,
                               data,
                               pieces,
                               lengths.data(),
                               require<uint64_t>(checksums, "checksums", {static_cast<int64_t>(n)}),
                               require<uint64_t>(tickets, "tickets", {static_cast<int64_t>(n)}),
                               bound.store->now()};
  std::vector<uint8_t> accepted(n);
  {
    const nb::gil_scoped_release unlocked;
    bound.store->write(batch, accepted.data());
  }
  return give<uint8_t>(std::move(accepted), {n});
}

Bytes contains(BoundStore& bound, const KeyArray& keys) {
  const Key* data = require_keys(keys);
  const size_t n = keys.shape(0);
  std::vector<uint8_t> found(n);
  {
    const nb::gil_scoped_release unlocked;
    bound.store->contains(data, n, found.data());
  }
  return give<uint8_t>(std::move(found), {n});
}

Bytes read_stored(BoundStore& bound, const KeyArray& keys, const ArrayOf<int64_t, kAnySize, 2>& pages,
                  double timeout) {
  const Deadline deadline = Deadline::after(timeout);
  const Key* data = require_keys(keys);
  const size_t n = keys.shape(0);
  const disk::ReadBatch batch{n, 1, data, require_pages(pages, n)};
  std::vector<ReadStatus> statuses(n);
  {
    const nb::gil_scoped_release unlocked;
    bound.store->read(batch, deadline, statuses.data());
  }
  return give<uint8_t>(std::move(statuses), {n});
}

Bytes drain_dropped(BoundStore& bound, size_t limit, double timeout) {
  std::vector<Key> keys;
  {
    const nb::gil_scoped_release unlocked;
    keys = bound.store->drain_dropped(limit, Deadline::after(timeout));
  }
  const size_t n = keys.size();
  return give<uint8_t>(std::move(keys), {n, sizeof(Key)});
}

std::pair<Bytes, uint64_t> list_stored(BoundStore& bound, uint64_t cursor, size_t limit) {
  if (limit == 0) throw nb::value_error("limit must be positive");
  std::vector<Key> keys;
  uint64_t next;
  {
    const nb::gil_scoped_release unlocked;
    next = bound.store->list(cursor, limit, &keys);
  }
  const size_t n = keys.size();
  return {give<uint8_t>(std::move(keys), {n, sizeof(Key)}), next};
}

std::tuple<Bytes, Array<uint64_t>, Array<uint64_t>> drain_recovered(BoundStore& bound, size_t limit,
                                                                    double timeout) {
  std::vector<Key> keys;
  std::vector<uint64_t> lengths;
  std::vector<uint64_t> checksums;
  {
    const nb::gil_scoped_release unlocked;
    for (const CatalogEntry& entry : bound.store->drain_recovered(limit, Deadline::after(timeout))) {
      keys.push_back(entry.key);
      lengths.push_back(entry.place.length);
      checksums.push_back(entry.place.checksum);
    }
  }
  const size_t n = keys.size();
  return {give<uint8_t>(std::move(keys), {n, sizeof(Key)}), give<uint64_t>(std::move(lengths), {n}),
          give<uint64_t>(std::move(checksums), {n})};
}

Array<uint64_t> drain_released(BoundStore& bound, size_t limit, double timeout) {
  std::vector<uint64_t> tickets;
  {
    const nb::gil_scoped_release unlocked;
    tickets = bound.released->drain(limit, Deadline::after(timeout));
  }
  const size_t n = tickets.size();
  return give<uint64_t>(std::move(tickets), {n});
}

Counts stats_of_store(BoundStore& bound) {
  const DiskStore& store = *bound.store;
  const disk::DiskCounters& counters = store.counters();
  nb::dict named;
  named["capacity"] = store.capacity();
  named["used"] = store.used();
  named["pages"] = store.n_pages();
  named["queued_bytes"] = store.queued_bytes();
  named["evicted_pages"] = store.n_evicted();
  named["lost_keys"] = store.n_lost_keys();
  const std::pair<const char*, const std::atomic<uint64_t>*> all[] = {
      {"stored_pages", &counters.stored_pages},
      {"stored_bytes", &counters.stored_bytes},
      {"written_bytes", &counters.written_bytes},
      {"known_pages", &counters.known_pages},
      {"refused_pages", &counters.refused_pages},
      {"changed_pages", &counters.changed_pages},
      {"lost_pages", &counters.lost_pages},
      {"hit_pages", &counters.hit_pages},
      {"hit_bytes", &counters.hit_bytes},
      {"missed_pages", &counters.missed_pages},
      {"bad_records", &counters.bad_records},
      {"timed_out_pages", &counters.timed_out_pages},
      {"read_errors", &counters.read_errors},
      {"write_errors", &counters.write_errors},
      {"suspensions", &counters.suspensions},
      {"recovered_pages", &counters.recovered_pages},
      {"removed_orphans", &counters.removed_orphans}};
  for (const auto& [name, value] : all) named[name] = value->load();
  return named;
}

std::tuple<bool, bool, std::string> health(BoundStore& bound) {
  DiskHealth health;
  {
    const nb::gil_scoped_release unlocked;
    health = bound.store->health();
  }
  return {health.is_suspended, health.is_unreadable, health.reason};
}

BoundStore* open_store(const std::string& path, const std::string& node_id, const std::string& name_space,
                       const std::string& cluster, uint64_t capacity, int layout, int fsync, int eviction,
                       bool allow_uring, bool allow_direct, uint64_t bucket_size, uint64_t queue_size,
                       uint64_t read_buffer, int compression, double retry_seconds, double stall_seconds,
                       uint64_t store_id, bool verify, const std::shared_ptr<FaultyFiles>& faults,
                       std::shared_ptr<ChangeLog> changes) {
  DiskOptions options;
  options.changes = std::move(changes);
  options.capacity = capacity;
  options.layout = static_cast<disk::LayoutKind>(layout);
  options.fsync = static_cast<disk::FsyncPolicy>(fsync);
  options.eviction = static_cast<disk::EvictionOrder>(eviction);
  options.allow_uring = allow_uring;
  options.allow_direct = allow_direct;
  options.bucket_size = bucket_size;
  options.queue_size = queue_size;
  options.read_buffer = read_buffer;
  options.compression = static_cast<disk::Compression>(compression);
  options.retry_seconds = retry_seconds;
  options.stall_seconds = stall_seconds;
  options.verify = verify;
  return open(path, {node_id, name_space, store_id, cluster}, options, faults);
}

void bind_faults(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::enum_<FileCall>(m, "FileCall")
      .value("OPEN", FileCall::kOpen)
      .value("READ", FileCall::kRead)
      .value("WRITE", FileCall::kWrite)
      .value("ALLOCATE", FileCall::kAllocate)
      .value("TRUNCATE", FileCall::kTruncate)
      .value("SYNC", FileCall::kSync)
      .value("REMOVE", FileCall::kRemove)
      .value("RENAME", FileCall::kRename);
  nb::class_<FaultyFiles>(
      m, "FaultyFiles",
      "Faults that are injected into the calls of a disk store. See native/src/disk/faulty_files.h.")
      .def(nb::init<>())
      .def("fail", &FaultyFiles::fail, "call"_a, "error"_a, "n"_a = FaultyFiles::kForEver, Released())
      .def("hang", &FaultyFiles::hang, "call"_a, Released())
      .def("kill_at", &FaultyFiles::kill_at, "nth"_a, "half"_a, Released())
      .def("heal", &FaultyFiles::heal, Released())
      .def("n_calls", &FaultyFiles::n_calls, Released());
}

}  // namespace

void bind_disk(nb::module_& m) {
  bind_faults(m);
  m.def(
      "disk_folder_refusal",
      [](const std::string& path, const std::string& node_id, const std::string& name_space,
         const std::string& cluster, int layout) {
        return disk::Folder::refusal(path, {node_id, name_space, 0, cluster},
                                     static_cast<disk::LayoutKind>(layout), disk::real_files());
      },
      "path"_a, nb::kw_only(), "node_id"_a, "name_space"_a, "cluster"_a, "layout"_a,
      nb::call_guard<nb::gil_scoped_release>());
  m.def("zstd_missing", &disk::zstd_missing, "library"_a = "libzstd.so.1");
  nb::class_<BoundStore>(m, "DiskStore",
                         "Pages in files. See p2pkv/disk/store.py and native/src/disk/store.h.")
      .def(nb::new_(&open_store), "path"_a, nb::kw_only(), "node_id"_a, "name_space"_a, "cluster"_a,
           "capacity"_a, "layout"_a, "fsync"_a, "eviction"_a, "allow_uring"_a, "allow_direct"_a,
           "bucket_size"_a, "queue_size"_a, "read_buffer"_a, "compression"_a, "retry_seconds"_a,
           "stall_seconds"_a, "store_id"_a, "verify"_a, "faults"_a.none(), "changes"_a.none())
      .def("write", write, "keys"_a.noconvert(), "pages"_a.noconvert(), "checksums"_a.noconvert(),
           "tickets"_a.noconvert(), "lengths_of_packed"_a.noconvert().none() = nb::none())
      .def("contains", contains, "keys"_a.noconvert())
      .def("read", read_stored, "keys"_a.noconvert(), "pages"_a.noconvert(), "timeout"_a)
      .def("list", list_stored, "cursor"_a, "limit"_a)
      .def("drain_dropped", drain_dropped, "limit"_a, "timeout"_a)
      .def("drain_recovered", drain_recovered, "limit"_a, "timeout"_a)
      .def("drain_released", drain_released, "limit"_a, "timeout"_a)
      .def("stats", stats_of_store)
      .def("health", health)
      .def(
          "flush",
          [](BoundStore& bound, double timeout) { return bound.store->flush(Deadline::after(timeout)); },
          "timeout"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "close",
          [](BoundStore& bound, double timeout) { return bound.store->close(Deadline::after(timeout)); },
          "timeout"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("is_recovered", [](BoundStore& bound) { return bound.store->is_recovered(); })
      .def_prop_ro("io", [](BoundStore& bound) { return bound.store->io_name(); })
      .def_prop_ro("is_direct", [](BoundStore& bound) { return bound.store->is_direct(); });
}

}  // namespace p2pkv
