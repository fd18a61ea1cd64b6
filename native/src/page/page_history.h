// What became of pages lately at one node: what `p2pkv explain` is answered from when a page is not there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/zeroed_array.h"
#include "page/location.h"

namespace p2pkv {

// Mirrored by PageEvent in p2pkv/explain/events.py.
enum class PageEvent : uint8_t {
  // It came.
  kStored = 0,   // into the pool: published, or brought back from disk
  kWritten = 1,  // to the disk
  // It went, or was not taken.
  kEvicted = 16,  // from the pool, for another
  kRetracted = 17,
  kCleared = 18,
  kBumped = 19,
  kNoRoom = 20,   // a publish found everything held
  kTooLate = 21,  // a publish had no time left for it
  kEvictedFromDisk = 22,
  kTakenFromDisk = 23,  // retracted
  kBadOnDisk = 24,      // what was read there failed a check
  kDiskCleared = 25,    // with all others, by a clear or a bump: the disk is not told which
  // It left this node's shard of the directory.
  kEntryDropped = 32,  // its owner said that it has it no more
  kEntryDoubted = 33,  // a reader found it stale
  kOwnerGone = 34,     // its owner was not in the view any more
  // A fetch of this node missed it; the reasons of FetchBatch::Miss follow.
  kMissed = 48,
};

// Thread-safe. Bounded rings, one for each of the four kinds of events above, so that none drives out
// another: the oldest records are written over.
class PageHistory {
 public:
  static constexpr size_t kKinds = 4;

  struct Record {
    Key key;
    uint64_t owner;  // node key of whom it is about; 0: this node
    uint64_t what;   // microseconds since 1970, and the event in the lowest eight bits

    PageEvent event() const { return static_cast<PageEvent>(what & 0xff); }
    uint64_t micros() const { return what >> 8; }
  };
  static_assert(sizeof(Record) == 32);

  // 65,536 by default: 2 MiB a kind at most, and a second of evictions of 64 KiB pages at 4 GB/s. A guess.
  explicit PageHistory(size_t capacity = 65536);

  void note(const Key& key, PageEvent event, uint64_t owner = 0);
  // The records of a page, of each kind the youngest first: the last few, and of those before the youngest of
  // each event and owner.
  std::vector<Record> find(const Key& key) const;
  // When a page came that is here, in microseconds: 0 if it is not remembered.
  uint64_t stored_at(const Key& key) const;
  // Of each kind the time in microseconds since when nothing is forgotten.
  std::array<uint64_t, kKinds> reach() const;

 private:
  struct Ring {
    explicit Ring(size_t capacity) : records(capacity) {}
    mutable std::mutex mutex;  // guards all below; taken after any other
    ZeroedArray<Record> records;
    uint64_t n_noted = 0;
  };

  static std::vector<Record> find_in(const Ring& ring, size_t capacity, const Key& key, size_t most,
                                     size_t most_others);

  const size_t capacity_;
  const uint64_t began_;
  std::array<Ring, kKinds> rings_;
};

}  // namespace p2pkv
