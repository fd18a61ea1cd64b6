// Which pages are fetched most, beside an exact count.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#include "cache/hot_pages.h"
#include "check.h"
#include "keys.h"
#include "seed.h"

namespace {

using p2pkv::HotPages;
using p2pkv::Key;
using p2pkv::test::key_of;

int64_t now_ns = 0;
int64_t test_now() {
  return now_ns;
}

void fetch(HotPages* hot, uint64_t name) {
  hot->note({key_of(name)}, {1});
}

double rate_of(HotPages* hot, uint64_t name) {
  for (const HotPages::Hot& page : hot->list(HotPages::kPlaces)) {
    if (page.key == key_of(name)) return page.reads_a_second;
  }
  return 0;
}

TEST(hot_pages_count_few_fetches_exactly) {
  now_ns = 0;
  HotPages hot(test_now);
  for (int i = 0; i < 30; ++i) fetch(&hot, 1);
  for (int i = 0; i < 10; ++i) fetch(&hot, 2);
  hot.note({key_of(3), key_of(2)}, {0, 1});  // the first one was missed
  now_ns = 10'000'000'000 - 1;
  const auto found = hot.list(2);
  CHECK_EQ(found.size(), 2u);
  CHECK(found[0].key == key_of(1));
  CHECK(std::abs(found[0].reads_a_second - 3.0) < 0.01);
  CHECK(std::abs(found[1].reads_a_second - 1.1) < 0.01);
  CHECK_EQ(rate_of(&hot, 3), 0.0);
}

TEST(hot_pages_forget_what_is_asked_for_no_more) {
  now_ns = 0;
  HotPages hot(test_now);
  for (int i = 0; i < 300; ++i) fetch(&hot, 1);
  now_ns = 15'000'000'000;
  fetch(&hot, 2);
  CHECK(rate_of(&hot, 1) > 0);
  now_ns = 26'000'000'000;
  CHECK_EQ(rate_of(&hot, 1), 0.0);
  CHECK(rate_of(&hot, 2) > 0);
  now_ns = 60'000'000'000;
  CHECK(hot.list(10).empty());
}

// A fifth of all fetches are of five pages, the others of a hundred thousand; so many that only a sample is
// looked at. What is said of the five is near what they were, and of no page much more than it was.
TEST(hot_pages_are_found_among_many_with_their_rates) {
  now_ns = 0;
  HotPages hot(test_now);
  std::mt19937_64 random(p2pkv::test::seed("hot_pages"));
  std::map<uint64_t, int> counts;
  constexpr int kFetches = 40'000;
  constexpr int kBatch = 32;
  for (int i = 0; i < kFetches; ++i) {
    std::vector<Key> keys;
    for (int k = 0; k < kBatch; ++k) {
      const uint64_t name = random() % 5 == 0 ? random() % 5 : 1000 + random() % 100'000;
      ++counts[name];
      keys.push_back(key_of(name));
    }
    hot.note(keys, std::vector<uint8_t>(kBatch, 1));
    now_ns += 9'900'000'000 / kFetches;
  }
  for (uint64_t name = 0; name < 5; ++name) {
    const double real = counts[name] / 9.9;
    const double said = rate_of(&hot, name);
    CHECK(said > 0.5 * real);
    CHECK(said < 1.5 * real);
  }
  size_t n_known = 0, n_overrated = 0;
  const auto all = hot.list(HotPages::kPlaces);
  std::unordered_map<Key, double, p2pkv::KeyHash> said_of;
  for (const HotPages::Hot& page : all) said_of[page.key] = page.reads_a_second;
  for (const auto& [name, count] : counts) {
    const auto said = said_of.find(key_of(name));
    if (said == said_of.end()) continue;
    // Each look counts for 256 reads. Of pages that were read ten times one in 100,000 is looked at thrice,
    // and one in 10^12 six times.
    n_overrated += said->second < 1.5 * count / 9.9 + 55 ? 0 : 1;
    CHECK(said->second < 1.5 * count / 9.9 + 160);
    ++n_known;
  }
  CHECK(n_overrated <= 10);
  CHECK_EQ(n_known, all.size());
}

// As many as 8,000 tokens have that all requests begin with, in pages of 16, each request with pages of its
// own behind.
TEST(hot_pages_know_a_long_prompt) {
  now_ns = 0;
  HotPages hot(test_now);
  constexpr uint64_t kHot = 500;
  constexpr int kRequests = 32;
  std::vector<Key> prompt;
  for (uint64_t name = 0; name < kHot; ++name) prompt.push_back(key_of(name));
  for (uint64_t request = 1; request <= kRequests; ++request) {
    hot.note(prompt, std::vector<uint8_t>(kHot, 1));
    for (uint64_t own = 0; own < 100; ++own) fetch(&hot, 1000 * request + own);
  }
  now_ns = 5'000'000'000;
  size_t n_known = 0;
  size_t n_others = 0;
  for (const HotPages::Hot& page : hot.list(HotPages::kPlaces)) {
    const bool is_hot = page.n_looks >= 4 && page.reads_a_second > 0.5 * kRequests / 5;
    const bool is_prompts = std::find(prompt.begin(), prompt.end(), page.key) != prompt.end();
    n_known += is_hot && is_prompts ? 1 : 0;
    n_others += is_hot && !is_prompts ? 1 : 0;
  }
  CHECK(n_known > kHot * 8 / 10);
  CHECK_EQ(n_others, 0u);
}

TEST(hot_pages_are_noted_by_threads_at_once) {
  HotPages hot;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 5000; ++k) fetch(&hot, 7);
    });
  }
  for (int i = 0; i < 20; ++i) hot.list(4);
  for (std::thread& thread : threads) thread.join();
  CHECK(rate_of(&hot, 7) > 0);
}

}  // namespace
