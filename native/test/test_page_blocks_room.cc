// Which pages go for which, and how much of a pool its pages can use.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "page_blocks_model.h"
#include "seed.h"

namespace {

// The pool's granules that pages use, in thousandths, over the second half of so many publishes of random
// sizes. One moment says little: a large page that was just made room for leaves a hole, and a small pool
// shows it by a twentieth.
uint32_t usable_share(uint32_t n_granules, const std::vector<uint32_t>& sizes, uint64_t n_publishes) {
  std::mt19937_64 random(p2pkv::test::seed("usable_share"));
  Model model(n_granules);
  uint64_t n_used = 0;
  uint64_t n_moments = 0;
  for (uint64_t name = 0; name < n_publishes; ++name) {
    CHECK(model.publish(sizes[random() % sizes.size()], name).length > 0);
    if (name < n_publishes / 2 || name % 100 != 0) continue;
    n_used += model.blocks.n_used();
    ++n_moments;
  }
  CHECK(model.n_evicted > 0);
  CHECK_EQ(model.n_paged(), model.blocks.n_used());
  return static_cast<uint32_t>(1000 * n_used / n_moments / n_granules);
}

TEST(page_blocks_of_one_size_use_all_of_the_pool_and_go_oldest_first) {
  // 2.25, 2.5, 2.94, 4.29 and 4.5 MiB, 36 and 292 KiB
  for (const uint32_t size : {576u, 640u, 753u, 1099u, 1152u, 9u, 73u}) {
    Model model(64 * size + size / 2);
    std::vector<uint32_t> published;
    for (uint64_t name = 0; name < 400; ++name) published.push_back(model.publish(size, name).block);
    CHECK_EQ(model.n_paged(), 64 * size);
    CHECK_EQ(model.evicted.size(), 400u - 64);
    CHECK(std::equal(model.evicted.begin(), model.evicted.end(), published.begin()));
  }
}

TEST(page_blocks_of_three_sizes_leave_little_unused) {
  CHECK(usable_share(1 << 18, {576, 753, 1099}, 20000) >= 940);
  CHECK(usable_share(1 << 18, {9, 576, 4096}, 20000) >= 970);
}

TEST(page_blocks_of_many_sizes_and_small_pools_leave_more_unused) {
  std::vector<uint32_t> sizes;
  for (uint32_t i = 0; i < 40; ++i) sizes.push_back(100 + 53 * i);
  CHECK(usable_share(1 << 17, sizes, 20000) >= 920);
  CHECK(usable_share(49152, {576, 753, 1099}, 20000) >= 920);
}

TEST(page_blocks_of_more_sizes_than_are_kept_are_rounded_up_by_a_sixteenth_at_most) {
  Model model(1 << 20);
  for (uint32_t i = 0; i < 200; ++i) {
    const uint32_t n = 1000 + i;
    const auto location = model.publish(n, i);
    const uint32_t length = model.blocks.length_of(location.block);
    CHECK(i < p2pkv::SizeQueues::kMostExact ? length == n : length >= n && length <= n + n / 16);
  }
  // Once they are gone, other sizes are exact again.
  uint32_t at = 0;
  for (uint32_t page; (page = model.blocks.next_page(&at, UINT32_MAX)) != kNone;) model.retract(page);
  CHECK_EQ(model.blocks.length_of(model.publish(777, 1).block), 777u);
}

TEST(page_blocks_a_page_can_be_as_large_as_the_pool) {
  Model model(100);
  for (uint64_t name = 0; name < 30; ++name) model.publish(1 + name % 3, name);
  CHECK_EQ(model.publish(100, 100).length, 100u);
  CHECK_EQ(model.n_paged(), 100u);
  CHECK_EQ(model.publish(1, 101).length, 1u);
  CHECK_EQ(model.n_paged(), 1u);
}

// A reader of each old location, whatever the new page's place is beside the old one's.
TEST(page_blocks_a_new_page_over_beside_and_around_an_old_one_makes_it_stale) {
  for (const uint32_t size : {1u, 2u, 3u, 5u, 8u, 13u, 16u}) {
    Model model(16);
    std::vector<Model::Location> old;
    for (uint64_t name = 0; name < 2; ++name) old.push_back(model.publish(8, name));
    for (uint64_t name = 2; name < 40; ++name) {
      old.push_back(model.publish(name % 4 == 0 ? 8 : size, name));
      CHECK(old.back().length > 0 && model.is_there(old.back()));
      for (const Model::Location& location : old) model.check(location);
      model.check_words();
    }
  }
}

TEST(page_blocks_no_size_is_kept_out_by_another) {
  Model model(1 << 16);
  std::mt19937_64 random(p2pkv::test::seed("no_size_is_kept_out"));
  // One size fills the pool and is used all the time; a page of another comes now and then, and stays as long
  // as it is as young as the others.
  for (const auto& [often, seldom] : {std::pair{9u, 4096u}, std::pair{4096u, 9u}}) {
    for (uint64_t name = 0; name < 30000; ++name) {
      const bool is_seldom = name % 500 == 499;
      const auto location = model.publish(is_seldom ? seldom : often, name);
      CHECK(location.length > 0);
      uint32_t at = static_cast<uint32_t>(random() % (1 << 16));
      const uint32_t page = model.blocks.next_page(&at, UINT32_MAX);
      if (page != kNone) model.blocks.touch(page);
      if (is_seldom) CHECK(model.is_there(location));
    }
  }
}

TEST(page_blocks_a_batch_takes_the_place_of_the_oldest_and_not_its_own) {
  constexpr uint32_t kGranules = 1 << 14;
  constexpr uint32_t kSize = 4;
  Model model(kGranules);
  uint64_t name = 0;
  while (name < kGranules) model.publish(1, name++);
  std::vector<Model::Location> young;
  while (kSize * young.size() < kGranules / 4 * 3) {  // from four fifths on, they are about as old
    std::vector<uint32_t> reserved;                   // all of a batch, before any of it is written
    for (int i = 0; i < 512; ++i) reserved.push_back(model.reserve(kSize));
    for (const uint32_t block : reserved) young.push_back(model.commit(block, kSize, name++));
  }
  for (const Model::Location& location : young) CHECK(model.is_there(location));
}

TEST(page_blocks_pins_are_gone_round_and_there_is_no_room_only_where_there_is_none) {
  Model model(4096);
  std::vector<uint32_t> pages;
  for (uint64_t name = 0; name < 4096; ++name) pages.push_back(model.publish(1, name).block);
  for (uint32_t page = 63; page < 4096; page += 64) model.pin(page);
  CHECK_EQ(model.publish(64, 5000).length, 0u);  // 63 between any two
  CHECK_EQ(model.n_evicted, 0u);
  CHECK_EQ(model.publish(63, 5001).length, 63u);
  model.unpin(127);
  CHECK_EQ(model.publish(127, 5002).length, 127u);
  for (uint32_t page = 63; page < 4096; page += 64) {
    if (page != 127) CHECK(model.pages[page].state == PageState::kCommitted);
  }
  for (uint32_t page = 63; page < 4096; page += 64) {
    if (page != 127) model.unpin(page);
  }
  CHECK_EQ(model.publish(4096, 5003).length, 4096u);
}

TEST(page_blocks_what_others_do_between_two_turns_is_respected) {
  Model model(8192);
  for (uint64_t name = 0; name < 8192; ++name) model.publish(1, name);
  std::vector<uint32_t> pinned;
  uint32_t next = 0;
  const uint32_t block = model.reserve(4096, [&] {
    // Wherever the search is, somebody pins a page far behind it, and takes another back.
    for (uint32_t at = (next += 1777) % 8192;;) {
      const uint32_t page = model.blocks.next_page(&at, UINT32_MAX);
      if (page == kNone) break;
      if (model.pages[page].is_held()) continue;
      if (pinned.size() < 2) {
        model.pin(page);
        pinned.push_back(page);
      } else {
        model.retract(page);
      }
      break;
    }
  });
  CHECK(model.n_again > 0);
  CHECK(pinned.size() == 2);
  for (const uint32_t page : pinned) CHECK(model.pages[page].state == PageState::kCommitted);
  if (block == kNone) return;  // the pins may have been in the way
  for (const uint32_t page : pinned) CHECK(page < block || page >= block + 4096);
}

// How long a turn takes is said and not judged: on a busy machine any time may be measured.
TEST(page_blocks_a_turn_among_a_million_pages_is_short) {
  constexpr uint32_t kPages = 1'000'000;
  Model model(kPages);
  for (uint64_t name = 0; name < kPages; ++name) model.publish(1, name);
  std::mt19937_64 random(p2pkv::test::seed("a_turn_is_short"));
  model.is_timed = true;
  for (uint64_t name = 0; name < 100'000; ++name) {
    static constexpr uint32_t kSizes[] = {1, 1, 1, 1, 1, 2, 9, 73, 576, 1152};
    CHECK(model.publish(kSizes[random() % std::size(kSizes)], kPages + name).length > 0);
  }
  CHECK(model.n_again > 0);
  auto& ns = model.turns_ns;
  std::sort(ns.begin(), ns.end());
  const auto at = [&](double share) { return double(ns[size_t(share * double(ns.size() - 1))]) / 1e3; };
  std::printf("        %zu turns: p50 %.1f us of the CPU, p99 %.1f, p99.99 %.1f, longest %.1f\n", ns.size(),
              at(0.5), at(0.99), at(0.9999), at(1));
}

// Only the last granules' pages may go: who looks for them looks through the pool once for all pages of a
// batch.
TEST(page_blocks_a_batch_without_a_page_to_give_up_looks_through_the_pool_once) {
  constexpr uint32_t kGranules = 1 << 17;
  Model model(kGranules);
  std::vector<uint32_t> pages;
  for (uint64_t name = 0; name < kGranules; ++name) pages.push_back(model.publish(1, name).block);
  for (const uint32_t page : pages) {
    if (page < kGranules - 64) model.pin(page);
  }
  for (int i = 0; i < 16; ++i) CHECK(model.reserve(3) != kNone);
  CHECK(model.n_again < 3 * kGranules / 512);
  // What may go again before the place where it ended is found as well.
  for (const uint32_t page : pages) {
    if (page >= 1000 && page < 1030) model.unpin(page);
  }
  for (int i = 16; i < 31; ++i) CHECK(model.reserve(3) != kNone);
}

// Runs of what may go, as long as that, that no held page is in.
bool has_run(const Model& model, uint32_t n) {
  std::vector<uint8_t> is_held(model.words.size());
  uint32_t at = 0;
  for (uint32_t page = model.blocks.next_page(&at, UINT32_MAX); page != kNone;
       page = model.blocks.next_page(&at, UINT32_MAX)) {
    if (model.pages[page].is_held()) std::fill_n(is_held.begin() + page, model.blocks.length_of(page), 1);
  }
  uint32_t run = 0;
  for (const uint8_t held : is_held) {
    run = held != 0 ? 0 : run + 1;
    if (run >= n) return true;
  }
  return false;
}

// A search goes on where the last one of its size has ended, whatever lies there by now: in the middle of a
// run, also of one that is too short at the pool's end.
TEST(page_blocks_there_is_no_room_only_where_there_is_none_wherever_the_last_search_ended) {
  std::mt19937_64 random(p2pkv::test::seed("wherever_the_last_search_ended"));
  uint64_t n_refused = 0;
  for (int pool = 0; pool < 200; ++pool) {
    const uint32_t n_granules = 16 + random() % 64;
    Model model(n_granules);
    std::vector<uint32_t> pinned;
    for (uint64_t name = 0; name < 600; ++name) {
      const uint32_t n = random() % 3 != 0 ? 1 : 2 + random() % 4;
      const bool has_room = has_run(model, n);
      if (random() % 4 == 0) {
        const uint32_t block = model.reserve(n);
        CHECK_EQ(block != kNone, has_room);
        if (block != kNone) model.blocks.drop(block);
      } else {
        CHECK_EQ(model.publish(n, name).length > 0, has_room);
      }
      n_refused += has_room ? 0 : 1;
      // Most of it is held, so that runs are short and few.
      uint32_t at = static_cast<uint32_t>(random() % n_granules);
      const uint32_t page = model.blocks.next_page(&at, UINT32_MAX);
      if (page != kNone && !model.pages[page].is_held() && random() % 4 != 0) {
        model.pin(page);
        pinned.push_back(page);
      } else if (!pinned.empty() && random() % 3 == 0) {
        std::swap(pinned[random() % pinned.size()], pinned.back());
        model.unpin(pinned.back());
        pinned.pop_back();
      }
    }
  }
  CHECK(n_refused > 2000);
}

TEST(page_blocks_are_walked_oldest_first_whatever_their_size) {
  Model model(1000);
  std::vector<uint32_t> order;
  for (uint64_t name = 0; name < 40; ++name) order.push_back(model.publish(1 + name * 7 % 5, name).block);
  model.blocks.touch(order[3]);
  order.push_back(order[3]);
  order.erase(order.begin() + 3);
  std::vector<uint32_t> walked;
  model.blocks.walk_oldest([&](uint32_t page) {
    walked.push_back(page);
    return walked.size() < 40;
  });
  CHECK(walked == order);
}

}  // namespace
