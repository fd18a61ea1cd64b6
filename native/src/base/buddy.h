// Buddy allocation: blocks of 2^order granules, aligned to their size, which merge again when freed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/zeroed_array.h"

namespace p2pkv {

// Allocates and frees in O(log n) without touching the heap. Not thread-safe.
//
// Invariant: the blocks, free and allocated, tile the granules, and no two buddies are both free: so when
// everything has been freed the tiling is that of the constructor, the largest aligned blocks that fit.
class Buddy {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr uint32_t kOrders = 32;

  // Any number of granules below 2^32 - 1.
  explicit Buddy(uint32_t n_granules);

  // The first granule of a block of 2^order granules, or kNone when no free block is that large.
  uint32_t allocate(uint32_t order);
  // `granule` is the first of an allocated block.
  void release(uint32_t granule);

  // Whether a block, free or allocated, starts here, and of which order it then is.
  bool starts_block(uint32_t granule) const { return blocks_[granule].state != kInside; }
  bool is_free(uint32_t granule) const { return (blocks_[granule].state & kFree) != 0; }
  uint32_t order_of(uint32_t granule) const { return blocks_[granule].state & kOrderMask; }

  uint32_t n_granules() const { return static_cast<uint32_t>(blocks_.size()); }
  uint32_t n_free() const { return n_free_; }
  // The largest block there can ever be.
  uint32_t max_order() const { return max_order_; }

  // The order whose blocks hold `n_granules` granules.
  static uint32_t order_for(uint64_t n_granules);

 private:
  static constexpr uint8_t kInside = 0;  // so that a zeroed table is one in which no block starts
  static constexpr uint8_t kStart = 0x80;
  static constexpr uint8_t kFree = 0x40;
  static constexpr uint8_t kOrderMask = 0x3f;

  // The links are those of the order's list of free blocks, and only valid while this block is on it.
  struct Block {
    uint32_t next;
    uint32_t previous;
    uint8_t state;
  };

  void push_free(uint32_t granule, uint32_t order);
  void remove_free(uint32_t granule, uint32_t order);

  ZeroedArray<Block> blocks_;
  std::array<uint32_t, kOrders> first_free_;
  uint32_t orders_free_ = 0;  // bit k: there is a free block of order k
  uint32_t n_free_ = 0;
  uint32_t max_order_ = 0;
};

}  // namespace p2pkv
