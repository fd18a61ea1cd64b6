// Engines that grow into their shares where the pool is full of old pages of other sizes, and what that costs
// the others.
#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "seed.h"
#include "shared_pool.h"

namespace {

constexpr uint64_t kOld = 1'000'000;  // names of the others' pages begin here

// Engines that have filled the pool with pages of a granule each, of which every fourth is taken back: the
// bytes that are left lie in pieces of one granule.
struct Scattered : Shared {
  Scattered(uint64_t n_granules, uint64_t share) : Shared(n_granules, share), end(kOld + n_granules) {
    for (uint64_t first = kOld; first < end; first += share)
      CHECK_EQ(publish(open(), names(first, first + share)).count(PoolStatus::kStored), share);
    for (uint64_t name = kOld; name < end; name += 4) CHECK(retract(*pool, name));
    n_before = n_old();
  }
  uint64_t n_old() { return count(kOld, end); }
  uint64_t n_lost() { return n_before - n_old(); }

  const uint64_t end;
  uint64_t n_before = 0;
};

}  // namespace

TEST(share_growth_goes_on_where_the_pool_is_full_of_old_pages_of_other_sizes) {
  for (const uint64_t n : {2, 3, 5, 8}) {
    Scattered shared(256, 64);
    const auto engine = shared.open();
    const uint64_t most = 64 / n;
    for (uint64_t name = 0; name < 2 * most; ++name) {
      CHECK_EQ(shared.publish(engine, {name}, n * kGranule).count(PoolStatus::kStored), 1U);
      CHECK_EQ(shared.count(0, name + 1), std::min(name + 1, most));
    }
    // What has gone for it is no more than it has, and none goes now that it has it.
    CHECK(shared.n_lost() <= 64);
    const uint64_t n_lost = shared.n_lost();
    for (uint64_t name = 1000; name < 1500; ++name)
      CHECK_EQ(shared.publish(engine, {name}, n * kGranule).count(PoolStatus::kStored), 1U);
    CHECK_EQ(shared.n_lost(), n_lost);
    CHECK_EQ(shared.charged(engine), most * n);
  }
}

TEST(share_growth_is_counted_by_what_it_costs) {
  Scattered shared(256, 64);
  const auto engine = shared.open();
  shared.publish(engine, names(0, 16), 2 * kGranule);
  CHECK(shared.n_outgrown() > 0);
  CHECK_EQ(shared.n_outgrown(), shared.n_lost());
  shared.publish(engine, names(100, 200), kGranule);  // there is a place for each of them
  CHECK_EQ(shared.n_outgrown(), shared.n_lost());
}

// However its pages come and go, and however often it is another process.
TEST(share_growth_costs_others_one_share_and_not_one_a_life) {
  std::mt19937_64 chance(p2pkv::test::seed("share_growth_costs"));
  uint64_t n_steps = 0, n_small = 0, sum_charged = 0;
  for (int life = 0; life < 10; ++life) {
    Scattered shared(256, 64);
    auto engine = shared.open();
    for (uint64_t name = 0; name < 600; ++name) {
      const uint64_t n = 1 + chance() % 8;
      shared.publish(engine, {name}, n * kGranule);
      if (chance() % 50 == 0) {
        shared.shares.leave(engine);
        engine = shared.open();
      }
      CHECK(shared.n_lost() <= 64);
      if (name < 60) continue;
      ++n_steps;
      n_small += shared.charged(engine) <= 32 ? 1 : 0;
      sum_charged += shared.charged(engine);
    }
  }
  // It has nearly all of its share by then. Now and then a large page takes many small ones' place.
  CHECK(n_small <= n_steps / 540);
  CHECK(sum_charged > 50 * n_steps);
}

TEST(share_growth_begins_anew_for_what_others_take) {
  Scattered shared(256, 64);
  const auto engine = shared.open();
  shared.publish(engine, names(0, 32), 2 * kGranule);
  CHECK_EQ(shared.charged(engine), 64U);
  const uint64_t n_lost = shared.n_lost();
  for (uint64_t name = 0; name < 32; ++name) static_cast<void>(retract(*shared.pool, name));
  // There is room for these as they are.
  shared.publish(engine, names(100, 132), 2 * kGranule);
  CHECK_EQ(shared.n_lost(), n_lost);
  for (uint64_t name = 100; name < 132; ++name) static_cast<void>(retract(*shared.pool, name));
  shared.publish(engine, names(200, 216), 4 * kGranule);
  CHECK_EQ(shared.charged(engine), 64U);
}

// Without this it would have none of its pages stored for good: its own lie in single granules.
TEST(share_growth_begins_anew_for_who_has_nothing_stored) {
  Scattered shared(256, 64);
  const auto engine = shared.open();
  CHECK_EQ(shared.publish(engine, names(0, 64)).count(PoolStatus::kStored), 64U);
  CHECK_EQ(shared.n_lost(), 0U);
  uint64_t n_refused = 0;
  for (uint64_t name = 100; name < 200; ++name)
    n_refused += shared.publish(engine, {name}, 2 * kGranule).count(PoolStatus::kNoRoom);
  CHECK_EQ(n_refused, 64U / 2);
  CHECK(shared.n_lost() <= n_refused * 2);
}

// The same where it has a page of that size: it would go in its place over and over.
TEST(share_growth_begins_anew_for_who_has_one_place) {
  Scattered shared(256, 64);
  const auto engine = shared.open();
  CHECK_EQ(shared.publish(engine, {1}, 2 * kGranule).count(PoolStatus::kStored), 1U);
  CHECK_EQ(shared.publish(engine, names(2, 64)).count(PoolStatus::kStored), 62U);
  shared.touch(1);
  CHECK_EQ(shared.publish(engine, {64}, 60 * kGranule).count(PoolStatus::kNoRoom), 1U);
  CHECK_EQ(shared.charged(engine), 4U);
  for (uint64_t name = 100; name < 200; ++name)
    CHECK_EQ(shared.publish(engine, {name}, 2 * kGranule).count(PoolStatus::kStored), 1U);
  CHECK(shared.charged(engine) > 56);
  CHECK(shared.n_lost() <= 2 * 64);
}

// The engine has vacated too much to grow, in a pool that has fewer bytes left than its page needs, until
// some pages have gone for it: then it goes on with what it has begun.
TEST(share_growth_takes_no_page_in_vain) {
  Shared shared(1024, 400);
  std::vector<PoolShare> engines;
  for (int i = 0; i < 3; ++i) engines.push_back(shared.open());
  std::vector<uint64_t> next(3);
  const auto publish = [&](size_t engine, uint64_t n) {
    const uint64_t first = engine * kOld + next[engine];
    CHECK_EQ(shared.publish(engines[engine], names(first, first + n)).count(PoolStatus::kStored), n);
    next[engine] += n;
  };
  for (int round = 0; round < 50; ++round) {
    publish(0, 8);
    publish(1, 8);
    if (round < 28) publish(2, 8);
  }
  CHECK_EQ(shared.publish(engines[0], {9 * kOld}, 300 * kGranule).count(PoolStatus::kNoRoom), 1U);
  CHECK_EQ(shared.charged(engines[0]), 100U);
  publish(2, 370 - next[2]);
  const auto n_there = [&] {
    size_t n = 0;
    for (uint64_t engine = 0; engine < 3; ++engine) n += shared.count(engine * kOld, engine * kOld + 400);
    return n;
  };
  const size_t before = n_there();
  CHECK_EQ(shared.publish(engines[0], {10 * kOld}, 200 * kGranule).count(PoolStatus::kStored), 1U);
  CHECK(before - n_there() <= 200);
}

// What an engine vacates, others use: then it finds no room in pieces that it has made itself. It grows by
// what it has not had yet, and no further.
TEST(share_growth_is_not_what_fills_what_was_vacated) {
  Scattered shared(512, 64);
  const auto engine = shared.open();
  const auto other = shared.open();
  uint64_t name = 0, n_cost = 0;
  const auto publish = [&](uint64_t n) {
    const uint64_t before = shared.n_outgrown();
    const auto outcome = shared.publish(engine, {name++}, n * kGranule);
    n_cost += shared.n_outgrown() - before;
    return outcome;
  };
  CHECK_EQ(shared.publish(engine, names(5000, 5040)).count(PoolStatus::kStored), 40U);
  for (int life = 0; life < 6; ++life) {
    CHECK_EQ(publish(1).count(PoolStatus::kStored), 1U);  // it has a place, and so nothing begins anew
    CHECK_EQ(publish(60).count(PoolStatus::kNoRoom), 1U);
    if (life > 0) shared.publish(other, names(6000 + 100 * life, 6000 + 100 * life + 10), 2 * kGranule);
    for (uint64_t i = 0; i < 17; ++i) {
      if (i % 5 == 0) CHECK_EQ(publish(1).count(PoolStatus::kStored), 1U);
      CHECK_EQ(publish(2).count(PoolStatus::kStored), 1U);
    }
  }
  CHECK(n_cost > 0);
  CHECK(n_cost <= 64 - 40);
}

// A greedy engine's pages lie between young ones that nobody is charged for; the old ones of those go.
TEST(share_growth_ends_where_what_is_nobodys_goes_oldest_first) {
  Shared shared(256, 64);
  for (uint64_t name = 0; name < 128; ++name) publish(*shared.pool, kOld + name, kGranule);
  const auto engine = shared.open();
  for (uint64_t name = 0; name < 64; ++name) {
    shared.publish(engine, {name});
    publish(*shared.pool, 2 * kOld + name, kGranule);
  }
  CHECK_EQ(shared.count(kOld, kOld + 128), 128U);
  for (const uint64_t name : {20, 60, 100}) CHECK(retract(*shared.pool, kOld + name));
  for (uint64_t name = 1000; name < 1004; ++name) {
    CHECK_EQ(shared.publish(engine, {name}, 12 * kGranule).count(PoolStatus::kStored), 1U);
    CHECK_EQ(shared.count(2 * kOld, 2 * kOld + 64), 64U);
  }
}

// These are older than all that nobody is charged for, and lie between it: an own page that is older than
// that goes first, though it is younger than these.
TEST(share_growth_ends_where_what_is_nobodys_is_younger) {
  Shared shared(192, 64);
  const auto engine = shared.open();
  for (uint64_t name = 0; name < 20; name += 4) {
    shared.publish(engine, names(name, name + 4));
    for (uint64_t i = name; i < name + 4; ++i) publish(*shared.pool, kOld + i, kGranule);
  }
  const auto quiet = shared.open();
  shared.publish(quiet, names(2 * kOld, 2 * kOld + 64));
  for (uint64_t name = 0; name < 36; ++name) publish(*shared.pool, 3 * kOld + name, kGranule);
  shared.publish(engine, {100}, 12 * kGranule);
  for (uint64_t name = 0; name < 20; ++name) shared.touch(kOld + name);
  for (uint64_t name = 0; name < 36; ++name) shared.touch(3 * kOld + name);
  shared.publish(engine, names(200, 232));
  CHECK_EQ(shared.charged(engine), 64U);
  CHECK_EQ(shared.publish(engine, {101}, 12 * kGranule).count(PoolStatus::kStored), 1U);
  CHECK_EQ(shared.count(kOld, kOld + 20) + shared.count(3 * kOld, 3 * kOld + 36), 56U);
  CHECK(!contains(*shared.pool, 100));
}

// Two greedy engines whose pages lie between those of two quiet ones, at the scale of a granule for 64 KiB: a
// pool of 256 MiB, shares of 64, pages of 64 and 192 KiB, and each 17th of 1 MiB.
TEST(share_growth_is_over_for_greedy_engines_between_quiet_ones) {
  constexpr uint64_t kShare = 1024;
  std::mt19937_64 chance(p2pkv::test::seed("share_growth_is_over"));
  Shared shared(4 * kShare, kShare);
  std::vector<PoolShare> engines;
  for (int i = 0; i < 4; ++i) engines.push_back(shared.open());  // the first two are quiet
  std::vector<bool> is_full(4);
  std::vector<uint64_t> next(4);
  while (!(is_full[0] && is_full[1] && is_full[2] && is_full[3])) {
    const size_t i = chance() % 4;
    const uint64_t n = chance() % 2 == 0 ? 1 : 3;
    const uint64_t most = i < 2 ? kShare - 20 : kShare;
    is_full[i] = is_full[i] || shared.charged(engines[i]) + n > most;
    if (!is_full[i]) shared.publish(engines[i], {i * kOld + next[i]++}, n * kGranule);
  }
  const auto n_quiet = [&] { return shared.count(0, next[0]) + shared.count(kOld, kOld + next[1]); };
  CHECK_EQ(n_quiet(), next[0] + next[1]);
  size_t n_refused = 0;
  for (uint64_t name = 0; name < 60'000; ++name) {
    const uint64_t n = name % 17 == 16 ? 16 : 1;
    n_refused += shared.publish(engines[2 + chance() % 2], {10 * kOld + name}, n * kGranule)
                     .count(PoolStatus::kNoRoom);
    if (name % 1000 == 999) CHECK_EQ(n_quiet(), next[0] + next[1]);
  }
  CHECK_EQ(n_refused, 0U);
  for (const size_t i : {2, 3}) CHECK(shared.charged(engines[i]) >= kShare - 64);
}
