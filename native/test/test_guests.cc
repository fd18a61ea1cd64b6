// Many guests go: in turns, between which others are served, and all of them before anybody is told so.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/checksum.h"
#include "base/timings.h"
#include "check.h"
#include "keys.h"
#include "pool/guests.h"

namespace {

using p2pkv::Guests;
using p2pkv::Key;
using p2pkv::Location;
using p2pkv::Origin;
using p2pkv::Pool;
using p2pkv::StoreStatus;
using p2pkv::TakeBack;
using p2pkv::TakenBack;
using p2pkv::test::key_of;

constexpr uint64_t kSource = 77, kOther = 78, kLog = 9;
constexpr uint32_t kPage = 64;
constexpr int64_t kSecondNs = 1'000'000'000;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kMany = 1 << 14;
#else
constexpr size_t kMany = 1 << 20;
#endif

// Of this thread: on a busy machine the clock says what others do.
int64_t processor_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * kSecondNs + now.tv_nsec;
}

struct Holder {
  std::shared_ptr<Pool> pool;
  Guests guests;

  explicit Holder(size_t n_pages)
      : pool(make_pool(n_pages)), guests(pool, std::make_shared<p2pkv::NamespaceEpochs>()) {}

  static std::shared_ptr<Pool> make_pool(size_t n_pages) {
    p2pkv::PoolOptions options{};
    options.nbytes = n_pages * kPage;
    options.granule = kPage;
    std::string error;
    auto pool = Pool::create(options, &error);
    CHECK(pool != nullptr);
    return pool;
  }

  // Stores pages of these names, as they were read when the source was at a number.
  void store(uint64_t source, uint64_t number, uint64_t first, size_t n) {
    guests.followed(source, {kLog, number});
    const std::vector<uint8_t> bytes(kPage, 0x5a);
    constexpr size_t kBatch = 4096;
    for (size_t done = 0; done < n; done += kBatch) {
      const size_t m = std::min(kBatch, n - done);
      std::vector<Key> keys;
      Location location{};
      location.length = kPage;
      location.checksum = p2pkv::checksum(bytes.data(), kPage);
      for (size_t i = 0; i < m; ++i) keys.push_back(key_of(first + done + i));
      const std::vector<int64_t> addresses(m, reinterpret_cast<int64_t>(bytes.data()));
      const std::vector<Origin> origins(m, Origin{source, {kLog, number}});
      std::vector<Location> locations(m, location);
      std::vector<StoreStatus> statuses(m);
      guests.store(keys.data(), addresses.data(), origins.data(), m, 0, locations.data(), statuses.data());
      for (const StoreStatus status : statuses) CHECK(status == StoreStatus::kStored);
    }
  }
  uint64_t clear(uint64_t source, uint64_t before) {
    return guests.take_back({source, kLog, before, before + 1, 1}, nullptr, 0);
  }
  bool is_there(uint64_t name) {
    const Key key = key_of(name);
    uint8_t found = 0;
    Location location{};
    pool->lookup(&key, 1, &found, &location);
    return found != 0;
  }
};

TEST(guests_go_in_turns_and_others_are_let_in_between) {
  Holder holder(2 * kMany);
  holder.store(kSource, 5, 0, kMany);
  holder.store(kOther, 5, kMany, 100);
  std::atomic<bool> is_over{false};
  int64_t longest_wait = 0;
  size_t n_waits = 0;
  std::thread publisher([&] {
    const Key key = key_of(~uint64_t{0});
    while (!is_over) {
      const p2pkv::Stopwatch waiting;
      holder.guests.take_out(&key, 1);  // what a publish does first
      longest_wait = std::max(longest_wait, waiting.ns());
      ++n_waits;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  });
  const int64_t began = processor_ns();
  const uint64_t ticket = holder.clear(kSource, 5);
  int64_t longest_turn = processor_ns() - began;
  size_t n_turns = 0;
  // How long a turn takes is the machine's affair as well: what a turn does is counted.
  for (bool is_going = true; is_going; ++n_turns) {
    CHECK(!holder.guests.has_gone(ticket));
    const uint64_t before = holder.guests.stats().pages;
    const int64_t turn = processor_ns();
    is_going = holder.guests.take_turn();
    longest_turn = std::max(longest_turn, processor_ns() - turn);
    CHECK(before - holder.guests.stats().pages <= 1024);
  }
  const int64_t took = processor_ns() - began;
  is_over = true;
  publisher.join();
  std::printf("  %zu guests in %.0f ms: %zu turns of at most %.2f ms, another waited %.2f ms at most (%zu)\n",
              kMany, static_cast<double>(took) / 1e6, n_turns, static_cast<double>(longest_turn) / 1e6,
              static_cast<double>(longest_wait) / 1e6, n_waits);
  CHECK(holder.guests.has_gone(ticket));
  CHECK(n_turns >= kMany / 1024);
  for (const uint64_t name : {uint64_t{0}, uint64_t{kMany / 2}, uint64_t{kMany - 1}})
    CHECK(!holder.is_there(name));
  CHECK(holder.is_there(kMany) && holder.is_there(kMany + 99));
  CHECK_EQ(holder.guests.stats().pages, 100u);
  CHECK_EQ(holder.guests.stats().n_taken_back, kMany);
}

// What is stored while others of its source are going stays, also under the key of one of them; and who takes
// something back after that is not told that it is gone before all is that was taken back earlier.
TEST(guests_that_come_while_others_go_stay) {
  constexpr size_t kSome = 2048;
  Holder holder(4 * kSome);
  holder.store(kSource, 5, 0, kSome);
  const uint64_t first = holder.clear(kSource, 5);
  const Key key = key_of(7);
  CHECK_EQ(holder.guests.take_out(&key, 1), 1u);
  holder.guests.followed(kSource, {kLog, 6});
  CHECK(!holder.guests.has_gone(first));  // who has nothing of it any more need not wait
  holder.store(kSource, 6, 7, 1);
  const Key named = key_of(kSome - 1);
  const uint64_t second = holder.guests.take_back({kSource, kLog, 6, 7, 0}, &named, 1);
  CHECK(!holder.is_there(kSome - 1));
  CHECK(!holder.guests.has_gone(second));
  while (holder.guests.take_turn()) {
  }
  CHECK(holder.guests.has_gone(first) && holder.guests.has_gone(second));
  for (uint64_t name = 0; name < kSome; ++name) CHECK_EQ(holder.is_there(name), name == 7);
  CHECK_EQ(holder.guests.stats().pages, 1u);
  CHECK_EQ(holder.guests.sources().size(), 1u);
  CHECK(holder.guests.has_gone(holder.clear(kSource, 7)) == false);
  holder.guests.take_turn();
  CHECK(!holder.is_there(7));
}

// A page that was read before its source took all back must not come after those that are going.
TEST(guests_read_before_all_was_taken_back_are_not_stored_while_it_goes) {
  Holder holder(4096);
  holder.store(kSource, 5, 0, 2000);
  holder.clear(kSource, 5);
  const Key key = key_of(5000);
  const std::vector<uint8_t> bytes(kPage);
  const auto address = reinterpret_cast<int64_t>(bytes.data());
  Location location{};
  location.length = kPage;
  location.checksum = p2pkv::checksum(bytes.data(), kPage);
  const Origin origin{kSource, {kLog, 5}};
  StoreStatus status{};
  holder.guests.store(&key, &address, &origin, 1, 0, &location, &status);
  CHECK(status == StoreStatus::kTakenBack);
  CHECK(!holder.is_there(5000));
}

TEST(guests_are_gone_when_their_sources_answer_is_taken_that_it_was_restarted) {
  Holder holder(4096);
  holder.store(kSource, 5, 0, 2000);
  holder.guests.followed(kSource, {kLog + 1, 1});
  CHECK_EQ(holder.guests.stats().pages, 0u);
  CHECK_EQ(holder.guests.stats().n_taken_back, 2000u);
  CHECK_EQ(holder.guests.stats().n_sources_lost, 1u);
  CHECK_EQ(holder.pool->stats().pages, 0u);
}

TEST(guests_followers_that_stay_away_are_forgotten) {
  Holder holder(16);
  uint8_t is_own = 0;
  TakenBack known{};
  for (const uint64_t follower : {1, 2, 3})
    CHECK(holder.guests.follow(follower, nullptr, 0, &is_own, &known));
  holder.guests.forget_absent({1, 2}, kSecondNs);
  holder.guests.forget_absent({1}, 30 * kSecondNs);
  holder.guests.forget_absent({1, 2}, 40 * kSecondNs);  // 2 was away for a moment
  CHECK_EQ(holder.guests.followers().size(), 3u);
  holder.guests.forget_absent({1, 2}, kSecondNs + Guests::kForgetAfterNs);
  CHECK(holder.guests.followers() == (std::vector<uint64_t>{1, 2}));
  CHECK(holder.guests.follow(3, nullptr, 0, &is_own, &known));
  CHECK_EQ(holder.guests.followers().size(), 3u);
}

// A peer that follows under names it has made up keeps out nobody who can be told of anything.
TEST(guests_members_have_a_place_among_the_followers) {
  constexpr uint64_t kMade = 1'000'000, kAway = 2, kFirst = 10, kSecond = 11, kStranger = 12;
  Holder holder(16);
  uint8_t is_own = 0;
  TakenBack known{};
  const auto follow = [&](uint64_t follower) {
    return holder.guests.follow(follower, nullptr, 0, &is_own, &known);
  };
  const auto follows = [&](uint64_t follower) {
    const std::vector<uint64_t> all = holder.guests.followers();
    return std::find(all.begin(), all.end(), follower) != all.end();
  };
  holder.guests.forget_absent({kFirst, kSecond}, kSecondNs);
  CHECK(follow(kAway));
  uint64_t made = kMade;
  while (follow(made)) ++made;
  CHECK_EQ(holder.guests.followers().size(), Guests::kMostFollowers);
  CHECK(!follow(kStranger));
  CHECK(follow(kFirst));
  CHECK(follows(kFirst));
  CHECK(!follows(kAway));  // it has asked longest ago
  CHECK(follow(kMade));    // once more, and the next one is the oldest
  CHECK(follow(kSecond));
  CHECK(follows(kMade));
  CHECK(!follows(kMade + 1));
  CHECK_EQ(holder.guests.followers().size(), Guests::kMostFollowers);
  CHECK(!follow(kStranger));
  // Nobody goes for one more who is none of the members, nor for one of them that has its place.
  CHECK(follow(kFirst));
  CHECK_EQ(holder.guests.followers().size(), Guests::kMostFollowers);
}

// What its source has let go is this node's own: nothing that the source says takes it out, it is handed on
// to others, and it is found as a page of a node with a disk.
TEST(guests_that_their_source_lets_go_are_own_pages) {
  constexpr size_t kSome = 2000;  // several turns
  Holder holder(4096);
  holder.store(kSource, 5, 0, kSome);
  holder.store(kOther, 5, kSome, 1);
  std::vector<p2pkv::PageUse> uses;
  holder.pool->list_uses(0, 4096, &uses);
  CHECK_EQ(uses.size(), 0u);
  std::vector<Key> keys;
  holder.guests.adopt(kSource, {kLog, 5}, &keys);
  CHECK_EQ(keys.size(), kSome);
  CHECK_EQ(holder.guests.stats().pages, 1u);
  holder.clear(kSource, 5);
  while (holder.guests.take_turn()) {
  }
  holder.pool->list_uses(0, 4096, &uses);
  CHECK_EQ(uses.size(), kSome);
  CHECK(holder.is_there(0) && holder.is_there(kSome - 1) && holder.is_there(kSome));
}

TEST(guests_are_not_adopted_when_their_source_took_something_back_unheard) {
  for (const TakenBack last : {TakenBack{kLog, 6}, TakenBack{kLog + 1, 5}, TakenBack{kLog, 4}}) {
    Holder holder(4096);
    holder.store(kSource, 5, 0, 2000);
    std::vector<Key> keys;
    holder.guests.adopt(kSource, last, &keys);
    CHECK_EQ(keys.size(), 0u);
    CHECK_EQ(holder.pool->stats().pages, 0u);
  }
}

}  // namespace
