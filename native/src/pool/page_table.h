// The pool's bookkeeping of pages: a record per granule, and a hash table from key to record.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/zeroed_array.h"
#include "page/location.h"

namespace p2pkv {

enum class PageState : uint8_t {
  kNone = 0,   // no page starts at this granule
  kCleared,    // nor here, but the block is kept for the next page of a size whose window this is
  kReserved,   // being copied in; not in the table
  kCommitted,  // in the table, its word is even
  kRetracted,  // out of the table, its word is odd; its block is freed when the last hold is gone
  kLeft,       // out of the table for a successor, its word is even; nothing becomes of its block here
};

// What the pool knows of the page that starts at a granule.
struct Page {
  Key key;
  uint64_t length : 40;
  uint64_t packed : 24;  // bytes of its packed form, in units of kPackedUnit; 0: it lies as it is
  uint64_t checksum;
  uint64_t generation;  // what the word holds
  uint32_t newer;       // neighbours of its size in the order of last use, while committed
  uint32_t older;
  uint32_t n_leases;  // pins that callers hold
  uint32_t n_copies;  // batches that are copying it out, or rely on its staying
  // One word: the record is a cache line.
  uint64_t stamp : 48;    // when it was used last (SizeQueues), while committed
  uint64_t is_guest : 1;  // another node's, which this one's disk does not take
  uint64_t size : 12;     // whose block it is (SizeQueues), while there is one
  PageState state : 3;

  bool is_held() const { return n_leases > 0 || n_copies > 0; }
};
static_assert(sizeof(Page) == 64, "a record should be one cache line");

// Open addressing with linear probing; nothing is allocated after the constructor. Not thread-safe.
//
// Invariant: exactly the committed pages are in the hash table.
class PageTable {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  // Who goes through many pages prefetches what is needed of the one that is so far ahead: enough for memory
  // to answer meanwhile. A guess.
  static constexpr size_t kAhead = 16;

  explicit PageTable(uint32_t n_granules);

  // Pages will begin nearly everywhere: then huge pages of memory cost no more than small ones, and come
  // faster.
  void expect_filling() {
    pages_.expect_filling();
    slots_.expect_filling();
  }

  Page& operator[](uint32_t granule) { return pages_[granule]; }
  const Page& operator[](uint32_t granule) const { return pages_[granule]; }

  // The granule of the page with this key, or kNone.
  uint32_t find(const Key& key) const;
  // Starts loading what `find` will need; pays when some other keys' prefetches lie between.
  void prefetch(const Key& key) const { __builtin_prefetch(&slots_[home(hash_of(key))]); }

  // Starts loading the record of a page.
  void prefetch_record(uint32_t granule) const { __builtin_prefetch(&pages_[granule], 1); }

  // Enters the page at `granule`, whose key is set and not in the table.
  void insert(uint32_t granule);
  void erase(uint32_t granule);

  uint32_t size() const { return size_; }

 private:
  // `tag` is a part of the hash that spares most looks at the wrong page's record.
  struct Slot {
    uint32_t tag;
    uint32_t page;  // granule + 1; 0: empty
  };

  size_t home(uint64_t hash) const { return static_cast<uint32_t>(hash) & mask_; }
  size_t slot_of(uint32_t granule) const;

  ZeroedArray<Page> pages_;
  ZeroedArray<Slot> slots_;
  size_t mask_;
  uint32_t size_ = 0;
};

}  // namespace p2pkv
