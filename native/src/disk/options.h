// What a disk store is told when it is opened, and what it counts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "disk/catalog.h"
#include "disk/compression.h"
#include "disk/files.h"

namespace p2pkv::disk {

// How pages lie on disk. Mirrors `LAYOUTS` in p2pkv/disk/store.py.
enum class LayoutKind : uint8_t { kBucket = 0, kFile = 1, kOffset = 2 };
const char* name_of(LayoutKind kind);

// What is forced to the device, and when; docs/disk.md says what each loses in a crash of the machine. A
// killed process loses nothing that was written, whatever this is.
enum class FsyncPolicy : uint8_t { kNever = 0, kSeal = 1, kBatch = 2 };

// The cluster that a store belongs to if it says nothing: those of before did not. Mirrors `DEFAULT_CLUSTER`
// in p2pkv/disk/store.py.
constexpr const char* kDefaultCluster = "p2pkv";

struct DiskIdentity {
  std::string node_id;
  std::string name_space;
  uint64_t store = 0;  // of a store yet to be made; 0: random
  std::string cluster = kDefaultCluster;
};

struct DiskOptions {
  uint64_t capacity = 0;  // bytes; never exceeded
  LayoutKind layout = LayoutKind::kBucket;
  FsyncPolicy fsync = FsyncPolicy::kSeal;
  EvictionOrder eviction = EvictionOrder::kOldest;
  bool allow_uring = true;
  bool allow_direct = true;
  uint64_t bucket_size = 0;         // 0: a 32nd of the capacity, 1 MiB at least and 512 MiB at most
  uint64_t queue_size = 64 << 20;   // bytes of pages that wait to be written
  uint64_t read_buffer = 32 << 20;  // bytes of reads under way; a page above it can't be read
  double retry_seconds = 1;         // between attempts to come back; doubled up to 30
  double stall_seconds = 2;         // a read this old makes others give up at once
  Compression compression = Compression::kOff;
  bool verify = true;                    // false: for the test that shows what it is good for
  size_t keys_logged = size_t{1} << 22;  // 64 MiB of keys at worst
  std::shared_ptr<ChangeLog> changes;    // is told of pages that come and go; null: nobody is
  Files* files = &real_files();
  // Says once for each ticket of an accepted page that its memory is no longer needed. From the writer's
  // thread; must not block.
  std::function<void(const uint64_t* tickets, size_t n)> release = [](const uint64_t*, size_t) {};
  // Says which pages were written, and can be read from here unless that failed or they were taken back. From
  // the writer's thread; must not block for long.
  std::function<void(const Key* keys, size_t n)> stored = [](const Key*, size_t) {};
  // Says that there is something to drain: keys that were dropped, or recovered. From any thread; must not
  // block.
  std::function<void()> changed = [] {};
};

// Only grow. Mirrored by name in `stats()`.
struct DiskCounters {
  std::atomic<uint64_t> stored_pages{0};
  std::atomic<uint64_t> stored_bytes{0};   // of pages
  std::atomic<uint64_t> written_bytes{0};  // the same as they are on disk
  std::atomic<uint64_t> known_pages{0};    // not written: there already
  std::atomic<uint64_t> refused_pages{0};  // queue full, suspended or too large
  std::atomic<uint64_t> changed_pages{0};  // their bytes were not those of the checksum any more
  std::atomic<uint64_t> lost_pages{0};  // accepted, and not written because of an error or for lack of room
  std::atomic<uint64_t> hit_pages{0};
  std::atomic<uint64_t> hit_bytes{0};
  std::atomic<uint64_t> missed_pages{0};
  std::atomic<uint64_t> bad_records{0};
  std::atomic<uint64_t> timed_out_pages{0};
  std::atomic<uint64_t> read_errors{0};
  std::atomic<uint64_t> write_errors{0};
  std::atomic<uint64_t> suspensions{0};
  std::atomic<uint64_t> recovered_pages{0};
  std::atomic<uint64_t> removed_orphans{0};
};

}  // namespace p2pkv::disk
