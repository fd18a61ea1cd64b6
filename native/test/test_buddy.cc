#include <cstdint>
#include <random>
#include <vector>

#include "base/buddy.h"
#include "check.h"

namespace {

using p2pkv::Buddy;

struct Block {
  uint32_t granule;
  uint32_t order;
};

// The blocks must tile the granules, aligned, with no two free buddies.
void check_tiling(const Buddy& buddy) {
  uint64_t granule = 0;
  uint64_t n_free = 0;
  while (granule < buddy.n_granules()) {
    const auto at = static_cast<uint32_t>(granule);
    CHECK(buddy.starts_block(at));
    if (!buddy.starts_block(at)) return;
    const uint32_t order = buddy.order_of(at);
    CHECK_EQ(granule % (uint64_t{1} << order), 0u);
    const uint64_t other = granule ^ (uint64_t{1} << order);
    if (buddy.is_free(at)) {
      n_free += uint64_t{1} << order;
      const bool has_buddy = other < buddy.n_granules() && buddy.starts_block(static_cast<uint32_t>(other));
      CHECK(!(has_buddy && buddy.is_free(static_cast<uint32_t>(other)) &&
              buddy.order_of(static_cast<uint32_t>(other)) == order));
    }
    granule += uint64_t{1} << order;
  }
  CHECK_EQ(granule, buddy.n_granules());
  CHECK_EQ(n_free, buddy.n_free());
}

TEST(buddy_order_for_is_the_smallest_that_fits) {
  CHECK_EQ(Buddy::order_for(1), 0u);
  CHECK_EQ(Buddy::order_for(2), 1u);
  CHECK_EQ(Buddy::order_for(3), 2u);
  CHECK_EQ(Buddy::order_for(4), 2u);
  CHECK_EQ(Buddy::order_for(5), 3u);
  CHECK_EQ(Buddy::order_for((uint64_t{1} << 32) + 1), 33u);
}

TEST(buddy_of_any_size_hands_out_every_granule) {
  for (const uint32_t n : {1u, 2u, 3u, 7u, 64u, 100u, 1023u}) {
    Buddy buddy(n);
    check_tiling(buddy);
    std::vector<bool> taken(n);
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t granule = buddy.allocate(0);
      CHECK(granule < n && !taken[granule]);
      taken[granule] = true;
    }
    CHECK_EQ(buddy.allocate(0), Buddy::kNone);
    CHECK_EQ(buddy.n_free(), 0u);
    for (uint32_t i = 0; i < n; ++i) buddy.release(i);
    check_tiling(buddy);
    CHECK(buddy.allocate(buddy.max_order()) != Buddy::kNone);
  }
}

TEST(buddy_refuses_orders_beyond_the_largest_block) {
  Buddy buddy(12);
  CHECK_EQ(buddy.max_order(), 3u);
  CHECK_EQ(buddy.allocate(4), Buddy::kNone);
  CHECK_EQ(buddy.allocate(31), Buddy::kNone);
  CHECK_EQ(buddy.allocate(33), Buddy::kNone);
}

TEST(buddy_random_blocks_never_overlap_and_all_merge_again) {
  const uint32_t seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  Buddy buddy(777);
  const Buddy fresh(777);
  std::vector<Block> held;
  std::vector<bool> taken(777);
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0) {
      const uint32_t order = random() % 6;
      const uint32_t granule = buddy.allocate(order);
      if (granule == Buddy::kNone) continue;
      CHECK_EQ(granule % (1u << order), 0u);
      for (uint32_t i = granule; i < granule + (1u << order); ++i) {
        CHECK(i < taken.size() && !taken[i]);
        taken[i] = true;
      }
      held.push_back({granule, order});
    } else if (!held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      const Block block = held.back();
      held.pop_back();
      for (uint32_t i = block.granule; i < block.granule + (1u << block.order); ++i) taken[i] = false;
      buddy.release(block.granule);
    }
    if (step % 100 == 0) check_tiling(buddy);
  }
  for (const Block& block : held) buddy.release(block.granule);
  check_tiling(buddy);
  for (uint32_t i = 0; i < 777; ++i) {
    CHECK_EQ(buddy.starts_block(i), fresh.starts_block(i));
    if (fresh.starts_block(i)) CHECK_EQ(buddy.order_of(i), fresh.order_of(i));
  }
}

}  // namespace
