#include <cstdint>
#include <iostream>
#include <random>
#include <vector>

#include "base/exact_blocks.h"
#include "check.h"
#include "seed.h"

namespace {

using p2pkv::ExactBlocks;

// The blocks must tile the granules, and no two free ones be neighbours.
void check_tiling(const ExactBlocks& blocks) {
  uint32_t n_free = 0;
  uint32_t previous = ExactBlocks::kNone;
  for (uint32_t block = 0; block < blocks.n_granules(); block += blocks.length_of(block)) {
    CHECK(blocks.starts_block(block));
    if (!blocks.starts_block(block) || blocks.length_of(block) == 0) return;
    CHECK_EQ(blocks.before(block), previous);
    for (uint32_t granule = block; granule < block + blocks.length_of(block); ++granule)
      CHECK_EQ(blocks.around(granule), block);
    CHECK(blocks.is_free(block) != blocks.is_taken_whole(block, blocks.length_of(block)));
    if (blocks.is_free(block)) {
      n_free += blocks.length_of(block);
      CHECK(previous == ExactBlocks::kNone || !blocks.is_free(previous));
    }
    previous = block;
  }
  CHECK_EQ(n_free, blocks.n_free());
}

TEST(exact_blocks_blocks_are_exact_and_all_of_any_size_is_handed_out) {
  for (const uint32_t n : {1u, 2u, 3u, 7u, 64u, 100u, 1023u}) {
    ExactBlocks blocks(n);
    check_tiling(blocks);
    CHECK_EQ(blocks.allocate(n + 1), ExactBlocks::kNone);
    CHECK_EQ(blocks.allocate(n), 0u);
    CHECK_EQ(blocks.allocate(1), ExactBlocks::kNone);
    blocks.release(0);
    for (uint32_t i = 0; i < n; ++i) CHECK(blocks.allocate(1) < n);
    CHECK_EQ(blocks.n_free(), 0u);
    check_tiling(blocks);
    for (uint32_t i = 0; i < n; ++i) blocks.release(i);
    check_tiling(blocks);
    CHECK_EQ(blocks.allocate(n), 0u);
  }
  CHECK_EQ(ExactBlocks(0).allocate(1), ExactBlocks::kNone);
}

TEST(exact_blocks_a_freed_block_merges_with_the_free_ones_beside_it) {
  ExactBlocks blocks(30);
  const uint32_t first = blocks.allocate(10);
  const uint32_t second = blocks.allocate(10);
  const uint32_t third = blocks.allocate(10);
  blocks.release(first);
  blocks.release(third);
  CHECK_EQ(blocks.find(11), ExactBlocks::kNone);
  blocks.release(second);
  CHECK_EQ(blocks.find(30), 0u);
  check_tiling(blocks);
}

TEST(exact_blocks_small_blocks_come_out_of_small_rests) {
  ExactBlocks blocks(100);
  const uint32_t front = blocks.allocate(5);
  const uint32_t wall = blocks.allocate(1);
  blocks.release(front);
  CHECK_EQ(blocks.allocate(5), front);  // and not out of the 94 behind the wall
  CHECK_EQ(blocks.find_longest(), wall + 1);
  CHECK_EQ(blocks.length_of(wall + 1), 94u);
  blocks.take(wall + 1, 94);
  CHECK_EQ(blocks.find_longest(), ExactBlocks::kNone);
}

TEST(exact_blocks_what_is_not_whole_is_told) {
  ExactBlocks blocks(30);
  CHECK(!blocks.is_taken_whole(0, 30));  // free
  blocks.take(0, 10);
  CHECK(blocks.is_taken_whole(0, 10));
  CHECK(!blocks.is_taken_whole(0, 9));
  CHECK(!blocks.is_taken_whole(0, 11));
  CHECK(!blocks.is_taken_whole(5, 5));  // inside another
}

// The oracle is an array that says of each granule whose it is.
TEST(exact_blocks_random_blocks_never_overlap_and_all_merge_again) {
  constexpr uint32_t kGranules = 777;
  std::mt19937_64 random(p2pkv::test::seed("exact_blocks"));
  ExactBlocks blocks(kGranules);
  std::vector<uint32_t> held;
  std::vector<uint32_t> owner(kGranules, ExactBlocks::kNone);
  const auto own = [&](uint32_t block, uint32_t whose) {
    for (uint32_t i = block; i < block + blocks.length_of(block); ++i) {
      CHECK(whose == ExactBlocks::kNone || owner[i] == ExactBlocks::kNone);
      owner[i] = whose;
    }
  };
  const auto forget = [&](size_t i) {
    own(held[i], ExactBlocks::kNone);
    held[i] = held.back();
    held.pop_back();
  };
  for (int step = 0; step < 40000; ++step) {
    const uint32_t n = 1 + random() % (random() % 10 == 0 ? 200 : 40);
    const size_t chosen = held.empty() ? 0 : random() % held.size();
    if (random() % 2 == 0) {
      const uint32_t block = blocks.allocate(n);
      if (block == ExactBlocks::kNone) continue;
      CHECK_EQ(blocks.length_of(block), n);
      CHECK(blocks.is_taken_whole(block, n));
      own(block, block);
      held.push_back(block);
    } else if (!held.empty() && random() % 4 > 0) {
      const uint32_t block = held[chosen];
      forget(chosen);
      blocks.release(block);
    } else if (!held.empty() && random() % 2 == 0) {
      const uint32_t block = held[chosen];
      if (blocks.length_of(block) <= n) continue;
      forget(chosen);
      blocks.split(block, n);
      for (const uint32_t part : {block, block + n}) {
        own(part, part);
        held.push_back(part);
      }
    } else if (!held.empty()) {
      const uint32_t block = held[chosen];
      const uint32_t behind = block + blocks.length_of(block);
      if (behind == kGranules) continue;
      forget(chosen);
      for (size_t i = 0; i < held.size(); ++i) {
        if (held[i] == behind) forget(i);
      }
      blocks.absorb(block);
      own(block, block);
      held.push_back(block);
    }
    if (step % 100 == 0) check_tiling(blocks);
  }
  for (const uint32_t block : held) blocks.release(block);
  check_tiling(blocks);
  CHECK_EQ(blocks.allocate(kGranules), 0u);
}

}  // namespace
