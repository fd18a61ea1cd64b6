#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/checksum.h"
#include "check.h"
#include "keys.h"
#include "page/words.h"
#include "pool/pool.h"

namespace {

using p2pkv::FetchStatus;
using p2pkv::Key;
using p2pkv::Location;
using p2pkv::PageBatch;
using p2pkv::Piece;
using p2pkv::Pool;
using p2pkv::PoolOptions;
using p2pkv::PoolStatus;
using p2pkv::test::key_of;

using Bytes = std::vector<uint8_t>;

constexpr uint32_t kGranule = 4096;

int64_t now_ns = 0;  // the pools' clock
int64_t fake_now_ns() {
  return now_ns;
}

std::shared_ptr<Pool> make_pool(uint64_t n_granules, uint64_t pinned_limit = 0,
                                size_t evictions_kept = 1024) {
  PoolOptions options{};
  options.nbytes = n_granules * kGranule;
  options.granule = kGranule;
  options.owner = 7;
  options.boot = 8;
  options.region = 9;
  options.pinned_limit = pinned_limit;
  options.evictions_kept = evictions_kept;
  options.now_ns = fake_now_ns;
  std::string error;
  auto pool = Pool::create(options, &error);
  CHECK(pool != nullptr);
  return pool;
}

Bytes bytes_of(uint64_t name, size_t nbytes) {
  return Bytes(nbytes, static_cast<uint8_t>(name * 37 + 1));
}

Piece piece_of(const Bytes& bytes) {
  return {reinterpret_cast<int64_t>(bytes.data()), static_cast<int64_t>(bytes.size())};
}

struct Stored {
  PoolStatus status;
  Location location;
};

Stored publish(Pool& pool, uint64_t name, size_t nbytes) {
  const Key key = key_of(name);
  const Bytes bytes = bytes_of(name, nbytes);
  const Piece piece = piece_of(bytes);
  Stored stored{};
  pool.publish({1, 1, &key, &piece}, &stored.status, &stored.location);
  return stored;
}

// The page's bytes, empty for a miss.
Bytes fetch(Pool& pool, uint64_t name, size_t nbytes) {
  const Key key = key_of(name);
  Bytes bytes(nbytes);
  const Piece piece = piece_of(bytes);
  FetchStatus status{};
  pool.fetch({1, 1, &key, &piece}, &status);
  return status == FetchStatus::kHit ? bytes : Bytes{};
}

bool contains(Pool& pool, uint64_t name) {
  const Key key = key_of(name);
  uint8_t found = 0;
  Location location{};
  pool.lookup(&key, 1, &found, &location);
  return found != 0;
}

uint64_t pin(Pool& pool, uint64_t name, double lease_seconds) {
  const Key key = key_of(name);
  uint8_t found = 0;
  uint64_t ticket = 0;
  Location location{};
  pool.pin(&key, 1, lease_seconds, &found, &ticket, &location);
  CHECK_EQ(found != 0, ticket != 0);
  return ticket;
}

bool unpin(Pool& pool, uint64_t ticket) {
  uint8_t held = 0;
  pool.unpin(&ticket, 1, &held);
  return held != 0;
}

bool retract(Pool& pool, uint64_t name) {
  const Key key = key_of(name);
  uint8_t found = 0;
  Location location{};
  pool.retract(&key, 1, &found, &location);
  return found != 0;
}

uint64_t word(const Pool& pool, const Location& location) {
  return p2pkv::load_word(pool.region().base() + location.word_offset);
}

TEST(pool_gives_back_the_bytes_and_says_where_they_lie) {
  const auto pool = make_pool(16);
  const Stored stored = publish(*pool, 1, 5000);
  CHECK_EQ(static_cast<int>(stored.status), static_cast<int>(PoolStatus::kStored));
  CHECK_EQ(stored.location.owner, 7u);
  CHECK_EQ(stored.location.boot, 8u);
  CHECK_EQ(stored.location.region, 9u);
  CHECK_EQ(stored.location.length, 5000u);
  CHECK_EQ(stored.location.flags, p2pkv::kResident);
  const Bytes bytes = bytes_of(1, 5000);
  CHECK_EQ(stored.location.checksum, p2pkv::checksum(bytes.data(), bytes.size()));
  CHECK(std::memcmp(pool->region().base() + stored.location.offset, bytes.data(), bytes.size()) == 0);
  CHECK(p2pkv::is_committed(stored.location.generation));
  CHECK_EQ(word(*pool, stored.location), stored.location.generation);
  CHECK(fetch(*pool, 1, 5000) == bytes);
  CHECK(fetch(*pool, 1, 4999).empty());
  CHECK(fetch(*pool, 2, 5000).empty());
}

TEST(pool_publishing_again_keeps_the_first_and_touches_it) {
  const auto pool = make_pool(2);
  publish(*pool, 1, 100);
  publish(*pool, 2, 100);
  CHECK(publish(*pool, 1, 100).status == PoolStatus::kExists);
  CHECK(publish(*pool, 1, 99).status == PoolStatus::kOtherLength);
  publish(*pool, 3, 100);
  CHECK(contains(*pool, 1));
  CHECK(!contains(*pool, 2));
}

TEST(pool_evicts_what_was_used_longest_ago_and_tells_of_it) {
  const auto pool = make_pool(4);
  std::vector<Location> locations;
  for (uint64_t name = 0; name < 4; ++name) locations.push_back(publish(*pool, name, kGranule).location);
  fetch(*pool, 0, kGranule);
  publish(*pool, 4, kGranule);
  CHECK(contains(*pool, 0));
  CHECK(!contains(*pool, 1));
  CHECK(word(*pool, locations[1]) != locations[1].generation);
  const auto evicted = pool->drain_evicted(10, 0);
  CHECK_EQ(evicted.size(), 1u);
  CHECK(evicted[0].key == key_of(1));
  CHECK(std::memcmp(&evicted[0].location, &locations[1], sizeof(Location)) == 0);
}

TEST(pool_the_front_of_a_batch_is_stored_and_stays_longest) {
  const auto pool = make_pool(4);
  std::vector<Key> keys;
  std::vector<Piece> pieces;
  const Bytes bytes(kGranule, 5);
  for (uint64_t name = 0; name < 6; ++name) {
    keys.push_back(key_of(name));
    pieces.push_back(piece_of(bytes));
  }
  publish(*pool, 0, kGranule);  // so that the front exists already: the batch must not evict it
  std::vector<PoolStatus> statuses(6);
  std::vector<Location> locations(6);
  pool->publish({6, 1, keys.data(), pieces.data()}, statuses.data(), locations.data());
  CHECK(statuses[0] == PoolStatus::kExists);
  for (size_t i = 1; i < 4; ++i) CHECK(statuses[i] == PoolStatus::kStored);
  for (size_t i = 4; i < 6; ++i) CHECK(statuses[i] == PoolStatus::kNoRoom);
  for (uint64_t name = 0; name < 4; ++name) CHECK(contains(*pool, name));
  for (uint64_t last = 3; last > 0; --last) {
    publish(*pool, 100 + last, kGranule);
    CHECK(!contains(*pool, last));
    CHECK(contains(*pool, last - 1));
  }
}

TEST(pool_copies_nothing_more_once_the_deadline_has_passed) {
  constexpr size_t kLarge = 4 << 20;
  const auto pool = make_pool(16 * (kLarge / kGranule));
  const Bytes bytes(kLarge, 5);
  std::vector<Bytes> out(8, Bytes(kLarge, 0));
  std::vector<Key> keys;
  std::vector<Piece> pieces, out_pieces;
  for (uint64_t name = 0; name < 8; ++name) {
    keys.push_back(key_of(name));
    pieces.push_back(piece_of(bytes));
    out_pieces.push_back(piece_of(out[name]));
  }
  const auto passed = p2pkv::Deadline::after(0);
  std::vector<PoolStatus> statuses(8);
  std::vector<Location> locations(8);
  pool->publish({8, 1, keys.data(), pieces.data()}, statuses.data(), locations.data(), passed);
  for (size_t i = 1; i < 8; ++i) {
    CHECK(statuses[i] == PoolStatus::kTimedOut);
    CHECK_EQ(locations[i].length, 0u);
    CHECK(!contains(*pool, i));
  }
  CHECK_EQ(pool->stats().used,
           statuses[0] == PoolStatus::kStored ? kLarge : 0u);  // their blocks are free again
  pool->publish({8, 1, keys.data(), pieces.data()}, statuses.data(), locations.data());
  std::vector<FetchStatus> fetched(8);
  pool->fetch({8, 1, keys.data(), out_pieces.data()}, fetched.data(), passed);
  for (size_t i = 1; i < 8; ++i) {
    CHECK(fetched[i] == FetchStatus::kTimedOut);
    CHECK(out[i] == Bytes(kLarge, 0));
  }
  pool->fetch({8, 1, keys.data(), out_pieces.data()}, fetched.data());
  for (size_t i = 0; i < 8; ++i) CHECK(fetched[i] == FetchStatus::kHit && out[i] == bytes);
}

TEST(pool_a_batch_does_not_evict_what_it_is_about_to_find) {
  const auto pool = make_pool(2);
  publish(*pool, 1, kGranule);  // used longest ago, but asked for again
  publish(*pool, 2, kGranule);
  const Bytes bytes(kGranule, 5);
  const Key keys[] = {key_of(3), key_of(1)};
  const Piece pieces[] = {piece_of(bytes), piece_of(bytes)};
  PoolStatus statuses[2];
  Location locations[2];
  pool->publish({2, 1, keys, pieces}, statuses, locations);
  CHECK(statuses[0] == PoolStatus::kStored);
  CHECK(statuses[1] == PoolStatus::kExists);
  CHECK(!contains(*pool, 2));
}

TEST(pool_a_large_page_gets_in_among_small_ones_and_the_other_way_round) {
  const auto pool = make_pool(8);
  for (uint64_t name = 0; name < 8; ++name) publish(*pool, name, kGranule);
  CHECK(publish(*pool, 100, 4 * kGranule).status == PoolStatus::kStored);
  CHECK_EQ(pool->stats().pages, 5u);
  for (uint64_t name = 10; name < 18; ++name) publish(*pool, name, kGranule);
  CHECK(!contains(*pool, 100));
  CHECK_EQ(pool->stats().pages, 8u);
  CHECK(publish(*pool, 101, 8 * kGranule).status == PoolStatus::kStored);
  CHECK_EQ(pool->stats().pages, 1u);
  CHECK(publish(*pool, 102, 8 * kGranule + 1).status == PoolStatus::kTooLarge);
  CHECK(contains(*pool, 101));
}

TEST(pool_a_large_page_goes_round_a_pinned_one) {
  const auto pool = make_pool(8);
  for (uint64_t name = 0; name < 8; ++name) publish(*pool, name, kGranule);
  const uint64_t ticket = pin(*pool, 0, 10);
  CHECK(publish(*pool, 100, 4 * kGranule).status == PoolStatus::kStored);
  CHECK(contains(*pool, 0));
  CHECK(publish(*pool, 101, 8 * kGranule).status == PoolStatus::kNoRoom);
  CHECK(unpin(*pool, ticket));
  CHECK(publish(*pool, 101, 8 * kGranule).status == PoolStatus::kStored);
}

TEST(pool_pins_keep_pages_until_unpin_or_the_end_of_the_lease) {
  now_ns = 0;
  const auto pool = make_pool(2, 2 * kGranule);
  publish(*pool, 1, 100);
  publish(*pool, 2, 100);
  const uint64_t first = pin(*pool, 1, 10);
  const uint64_t second = pin(*pool, 2, 10);
  CHECK_EQ(pool->stats().pinned_bytes, 2u * kGranule);
  CHECK(publish(*pool, 3, 100).status == PoolStatus::kNoRoom);
  CHECK(unpin(*pool, first));
  CHECK(!unpin(*pool, first));
  CHECK(publish(*pool, 3, 100).status == PoolStatus::kStored);
  CHECK(!contains(*pool, 1));
  now_ns += 10'000'000'000;
  CHECK(publish(*pool, 4, 100).status == PoolStatus::kStored);
  CHECK(publish(*pool, 5, 100).status == PoolStatus::kStored);
  CHECK(!contains(*pool, 2));
  CHECK_EQ(pool->stats().pinned_bytes, 0u);
  const uint64_t reused = pin(*pool, 5, 10);
  CHECK(!unpin(*pool, second));
  CHECK(!unpin(*pool, first));
  CHECK(!unpin(*pool, 0));
  CHECK_EQ(pool->stats().pinned_bytes, uint64_t{kGranule});
  CHECK(unpin(*pool, reused));
}

TEST(pool_pins_hold_no_more_than_their_limit) {
  const auto pool = make_pool(4);  // so two granules
  for (uint64_t name = 0; name < 4; ++name) publish(*pool, name, 100);
  const uint64_t first = pin(*pool, 0, 10);
  const uint64_t again = pin(*pool, 0, 10);
  CHECK(pin(*pool, 1, 10) != 0);
  CHECK_EQ(pin(*pool, 2, 10), 0u);
  CHECK_EQ(pin(*pool, 99, 10), 0u);
  CHECK(unpin(*pool, first));
  CHECK_EQ(pin(*pool, 2, 10), 0u);
  CHECK(unpin(*pool, again));
  CHECK(pin(*pool, 2, 10) != 0);
}

TEST(pool_a_retracted_page_is_stale_at_once_but_keeps_its_bytes_while_pinned) {
  const auto pool = make_pool(1, kGranule);
  const Location location = publish(*pool, 1, 100).location;
  const uint64_t ticket = pin(*pool, 1, 10);
  CHECK(retract(*pool, 1));
  CHECK(!retract(*pool, 1));
  CHECK(!contains(*pool, 1));
  CHECK(!p2pkv::is_committed(word(*pool, location)));
  CHECK(publish(*pool, 1, 100).status == PoolStatus::kNoRoom);
  CHECK_EQ(pool->region().base()[location.offset], bytes_of(1, 1)[0]);
  CHECK(unpin(*pool, ticket));
  CHECK_EQ(pool->stats().used, 0u);
  const Location again = publish(*pool, 1, 100).location;
  CHECK_EQ(again.offset, location.offset);
  CHECK(again.generation > location.generation);
}

TEST(pool_a_page_published_again_has_another_generation_wherever_it_lies) {
  const auto pool = make_pool(16);
  publish(*pool, 0, kGranule);
  const Location before = publish(*pool, 1, kGranule).location;
  CHECK(retract(*pool, 1));
  publish(*pool, 2, kGranule);  // takes the block that was free
  const Location after = publish(*pool, 1, kGranule).location;
  CHECK(after.offset != before.offset);
  CHECK(after.generation > before.generation);
  CHECK_EQ(word(*pool, after), after.generation);
}

// Seconds of the fastest of three runs: what it takes where nobody else had the processor.
template <typename Body>
double fastest(Body body) {
  double best = 1e9;
  for (int run = 0; run < 3; ++run) {
    const int64_t began = p2pkv::steady_now_ns();
    body();
    best = std::min(best, static_cast<double>(p2pkv::steady_now_ns() - began) * 1e-9);
  }
  return best;
}

// Publishes pages of one granule until the pool is full, and pins one in each window of `window` granules.
void fill_and_pin(Pool& pool, uint64_t n_granules, uint64_t window) {
  const Bytes bytes = bytes_of(1, 8);
  const std::vector<Piece> pieces(n_granules, piece_of(bytes));
  std::vector<Key> keys(n_granules);
  for (uint64_t name = 0; name < n_granules; ++name) keys[name] = key_of(name);
  std::vector<PoolStatus> statuses(n_granules);
  std::vector<Location> locations(n_granules);
  pool.publish({n_granules, 1, keys.data(), pieces.data()}, statuses.data(), locations.data());
  for (uint64_t name = 0; name < n_granules; ++name) {
    if ((locations[name].word_offset / 8) % window == window - 1) CHECK(pin(pool, name, 1e4) != 0);
  }
}

TEST(pool_looks_at_each_window_once_when_there_is_no_room) {
  constexpr uint64_t kGranules = 32768;
  constexpr uint64_t kWindow = 1024;
  const auto pool = make_pool(kGranules);
  fill_and_pin(*pool, kGranules, kWindow);
  const double listing = fastest([&] {
    std::vector<p2pkv::Eviction> pages;
    pool->list(0, kGranules, &pages);
    CHECK_EQ(pages.size(), kGranules);
  });
  const double searching =
      fastest([&] { CHECK(publish(*pool, kGranules, kWindow * kGranule).status == PoolStatus::kNoRoom); });
  std::printf("listing all pages %.2f ms, a search in vain %.2f ms\n", listing * 1e3, searching * 1e3);
  CHECK(searching < 5 * listing + 0.01);  // with every window once for each of its pages: 100 times as long
}

TEST(pool_gives_up_a_search_for_room_at_the_deadline) {
  constexpr uint64_t kGranules = 8192;
  const auto pool = make_pool(kGranules);
  fill_and_pin(*pool, kGranules, 1024);
  const Key key = key_of(kGranules);
  const Bytes bytes = bytes_of(1, 1024 * kGranule);
  const Piece piece = piece_of(bytes);
  Stored stored{};
  pool->publish({1, 1, &key, &piece}, &stored.status, &stored.location, p2pkv::Deadline::after(-1));
  CHECK(stored.status == PoolStatus::kTimedOut);
  CHECK_EQ(pool->stats().pages, kGranules);
}

TEST(pool_lets_others_in_during_a_search) {
  p2pkv::PoliteMutex mutex;
  std::atomic<bool> is_in{false};
  mutex.lock();
  std::thread other([&] {
    mutex.lock();
    is_in = true;
    mutex.unlock();
  });
  const auto until = p2pkv::Deadline::after(60);
  while (!is_in && !until.passed()) mutex.let_in();
  CHECK(is_in);
  mutex.unlock();
  other.join();
}

TEST(pool_purge_leaves_nothing_of_before_whatever_is_used_meanwhile) {
  constexpr uint64_t kGranules = 8192;
  const auto pool = make_pool(kGranules);
  for (int round = 0; round < 3; ++round) {
    for (uint64_t name = 0; name < kGranules / 2; ++name) publish(*pool, name, 100);
    std::atomic<bool> is_over{false};
    std::thread other([&] {
      for (uint64_t i = 0; !is_over; ++i) {
        publish(*pool, kGranules + i % 1000, 100);
        fetch(*pool, i * 7919 % (kGranules / 2), 100);  // makes it young
      }
    });
    CHECK(pool->purge() >= kGranules / 2);
    is_over = true;
    other.join();
    for (uint64_t name = 0; name < kGranules / 2; ++name) CHECK(!contains(*pool, name));
  }
}

TEST(pool_purge_gives_everything_back_and_is_told) {
  const auto pool = make_pool(13);
  std::vector<Location> locations;
  for (uint64_t name = 0; name < 9; ++name) locations.push_back(publish(*pool, name, 100).location);
  CHECK_EQ(pool->purge(), 9u);
  CHECK_EQ(pool->stats().used, 0u);
  CHECK_EQ(pool->stats().pages, 0u);
  CHECK_EQ(pool->drain_evicted(100, 0).size(), 9u);
  for (const Location& location : locations) CHECK(!p2pkv::is_committed(word(*pool, location)));
  CHECK(publish(*pool, 100, 8 * kGranule).status == PoolStatus::kStored);
  CHECK(publish(*pool, 101, 4 * kGranule).status == PoolStatus::kStored);
  CHECK(publish(*pool, 102, kGranule).status == PoolStatus::kStored);
}

TEST(pool_lists_every_page_once_however_it_is_cut) {
  const auto pool = make_pool(64);
  for (uint64_t name = 0; name < 20; ++name) publish(*pool, name, (name % 3 + 1) * kGranule);
  for (const size_t max : {1u, 3u, 20u, 100u}) {
    std::vector<p2pkv::Eviction> pages;
    uint64_t cursor = 0;
    do {
      const size_t before = pages.size();
      cursor = pool->list(cursor, max, &pages);
      CHECK(pages.size() - before <= max);
    } while (cursor != 0);
    CHECK_EQ(pages.size(), 20u);
    for (uint64_t name = 0; name < 20; ++name) {
      const auto is_it = [&](const p2pkv::Eviction& page) { return page.key == key_of(name); };
      CHECK_EQ(std::count_if(pages.begin(), pages.end(), is_it), 1);
    }
  }
}

TEST(pool_drops_the_oldest_evictions_when_nobody_drains) {
  const auto pool = make_pool(1, 0, 2);
  for (uint64_t name = 0; name < 5; ++name) publish(*pool, name, 100);
  CHECK_EQ(pool->stats().dropped_evictions, 2u);
  const auto evicted = pool->drain_evicted(10, 0);
  CHECK_EQ(evicted.size(), 2u);
  CHECK(evicted[0].key == key_of(2));
  CHECK(evicted[1].key == key_of(3));
}

TEST(pool_drainers_wake_for_an_eviction_and_for_close) {
  const auto pool = make_pool(1);
  publish(*pool, 1, 100);
  size_t n_drained = 0;
  std::thread waiting([&] {
    n_drained = pool->drain_evicted(10, 60).size();
    while (!pool->drain_evicted(10, 60).empty()) continue;
  });
  publish(*pool, 2, 100);
  pool->close();
  waiting.join();
  CHECK_EQ(n_drained, 1u);
}

TEST(pool_drainers_that_gather_go_on_when_they_have_enough) {
  const auto pool = make_pool(1);
  publish(*pool, 1, 100);
  publish(*pool, 2, 100);
  size_t n_drained = 0;
  std::thread gathering([&] { n_drained = pool->drain_evicted(3, 60, 60).size(); });
  publish(*pool, 3, 100);
  publish(*pool, 4, 100);
  gathering.join();
  CHECK_EQ(n_drained, 3u);
}

TEST(pool_refuses_impossible_sizes) {
  std::string error;
  for (const uint64_t nbytes : {uint64_t{0}, uint64_t{4095}, uint64_t{4097}}) {
    PoolOptions options{};
    options.nbytes = nbytes;
    error.clear();
    CHECK(Pool::create(options, &error) == nullptr);
    CHECK(error.find(std::to_string(nbytes)) != std::string::npos);
  }
  PoolOptions options{};
  options.nbytes = 6300;
  options.granule = 63;
  CHECK(Pool::create(options, &error) == nullptr);
}

}  // namespace
