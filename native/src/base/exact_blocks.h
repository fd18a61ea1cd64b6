// Blocks of any number of granules, side by side, which merge again when freed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/zeroed_array.h"

namespace p2pkv {

// Allocates and frees in O(1) without touching the heap: free blocks lie in bins by size, sixteen an octave.
// Not thread-safe. A block is named by its first granule.
//
// Invariant: the blocks, free and taken, tile the granules, and no two neighbours are both free: so when
// everything has been freed there is one block.
class ExactBlocks {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr uint32_t kMostGranules = 1u << 31;

  // At most kMostGranules, all in one free block.
  explicit ExactBlocks(uint32_t n_granules);

  // Blocks will begin nearly everywhere.
  void expect_filling() {
    blocks_.expect_filling();
    kinds_.expect_filling();
  }

  uint32_t n_granules() const { return static_cast<uint32_t>(blocks_.size()); }
  uint32_t n_free() const { return n_free_; }

  bool starts_block(uint32_t granule) const { return kinds_[granule] != Kind::kInside; }
  bool is_free(uint32_t block) const { return kinds_[block] == Kind::kFree; }
  uint32_t length_of(uint32_t block) const { return blocks_[block].length; }
  // The block that ends where this one begins; kNone at the front.
  uint32_t before(uint32_t block) const { return block == 0 ? kNone : blocks_[block - 1].start; }
  // The block that holds the granule. Walks back to where it begins.
  uint32_t around(uint32_t granule) const;
  // Whether these granules are one taken block, with blocks that end and begin right at its ends.
  bool is_taken_whole(uint32_t block, uint32_t n_granules) const;

  // A free block of at least `n_granules`, one of the smallest that fit; kNone if there is none.
  uint32_t find(uint32_t n_granules) const;
  // A free block of which no other is longer by more than a sixteenth; kNone if nothing is free.
  uint32_t find_longest() const;
  // A block of exactly `n_granules`, taken; kNone if no free one is as long.
  uint32_t allocate(uint32_t n_granules);
  // Takes the front of a free block; what is left of it stays free.
  void take(uint32_t block, uint32_t n_granules);
  // Frees a taken block.
  void release(uint32_t block);

  // A taken block grows by the block behind it, free or taken.
  void absorb(uint32_t block);
  // A taken block becomes two taken ones, the first of `n_granules`; fewer than it has.
  void split(uint32_t block, uint32_t n_granules);

 private:
  enum class Kind : uint8_t { kInside = 0, kFree, kTaken };  // zero is that of a table not yet touched

  static constexpr uint32_t kBinsPerRow = 16;
  static constexpr uint32_t kRows = 32;

  // What is known at a granule. A block of one granule uses all of it.
  struct Block {
    uint32_t length;  // where a block begins
    uint32_t start;   // where a block ends: its first granule
    uint32_t next;    // where a free block begins: its neighbours in the bin
    uint32_t previous;
  };

  static uint32_t bin_of(uint32_t length);
  void tag(uint32_t block, uint32_t length, Kind kind);
  void bin(uint32_t block);
  void unbin(uint32_t block);
  uint32_t first_from(uint32_t bin) const;

  ZeroedArray<Block> blocks_;
  ZeroedArray<Kind> kinds_;  // apart: a walk over small blocks reads few cache lines
  std::array<uint32_t, kRows * kBinsPerRow> bins_;
  std::array<uint32_t, kRows> bins_used_{};  // bit k: the row's bin k has a block
  uint32_t rows_used_ = 0;
  uint32_t n_free_ = 0;
};

}  // namespace p2pkv
