// Shares of engines in a pool: who is above his own takes out his own pages, the oldest first.
#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "attach/engine_shares.h"
#include "pool_calls.h"
#include "seed.h"

namespace {

using p2pkv::attaching::EngineShares;

// A pool whose pages are of one granule each, and engines that may have `share` of them.
struct Shared {
  Shared(uint64_t n_granules, uint64_t share)
      : pool(make_pool(n_granules)), shares(*pool, share * kGranule) {}

  struct Outcome {
    size_t n_admitted;
    std::vector<PoolStatus> statuses;
    std::vector<Location> locations;
    size_t count(PoolStatus status) const {
      return static_cast<size_t>(std::count(statuses.begin(), statuses.end(), status));
    }
  };

  Outcome publish(EngineShares::Account& account, const std::vector<uint64_t>& names,
                  size_t nbytes = kGranule) {
    const Bytes bytes = bytes_of(1, nbytes);
    std::vector<Key> keys;
    for (const uint64_t name : names) keys.push_back(key_of(name));
    const std::vector<Piece> pieces(names.size(), piece_of(bytes));
    const auto admitted = shares.admit(account, {names.size(), 1, keys.data(), pieces.data()});
    Outcome outcome{admitted.n_pages, std::vector<PoolStatus>(admitted.n_pages),
                    std::vector<Location>(admitted.n_pages)};
    pool->publish({admitted.n_pages, 1, keys.data(), pieces.data()}, outcome.statuses.data(),
                  outcome.locations.data());
    shares.settle(account, admitted, keys.data(), outcome.statuses.data(), outcome.locations.data());
    return outcome;
  }
  void touch(uint64_t name) {
    const Key key = key_of(name);
    CHECK_EQ(pool->touch(&key, 1), 1U);
  }
  size_t count(uint64_t first, uint64_t end) {
    size_t n = 0;
    for (uint64_t name = first; name < end; ++name) n += contains(*pool, name) ? 1 : 0;
    return n;
  }

  std::shared_ptr<Pool> pool;
  EngineShares shares;
};

std::vector<uint64_t> names(uint64_t first, uint64_t end) {
  std::vector<uint64_t> all;
  for (uint64_t name = first; name < end; ++name) all.push_back(name);
  return all;
}

}  // namespace

TEST(shares_who_publishes_without_end_takes_out_his_own_pages_alone) {
  Shared shared(64, 24);
  auto& quiet = shared.shares.open();
  auto& greedy = shared.shares.open();
  shared.publish(quiet, names(0, 24));
  for (uint64_t first = 1000; first < 3000; first += 4) {
    CHECK_EQ(shared.publish(greedy, names(first, first + 4)).count(PoolStatus::kStored), 4U);
    CHECK(shared.count(1000, first + 4) <= 24);
    CHECK_EQ(shared.count(first, first + 4), 4U);
  }
  CHECK_EQ(shared.count(0, 24), 24U);
  CHECK_EQ(shared.count(2976, 3000), 24U);  // the oldest go first
  shared.publish(greedy, {5000});
  CHECK_EQ(shared.count(2976, 2979), 3U);  // and of a batch its end, as in the pool
  CHECK_EQ(shared.shares.n_taken_out(), 2001U - 24U);
  CHECK_EQ(shared.shares.largest_charge(), 24U * kGranule);
}

TEST(shares_a_page_that_was_used_since_has_a_second_chance) {
  Shared shared(64, 8);
  auto& engine = shared.shares.open();
  shared.publish(engine, names(0, 8));
  for (uint64_t name = 8; name < 100; ++name) {
    shared.touch(0);
    shared.publish(engine, {name});
    CHECK(contains(*shared.pool, 0));
    CHECK_EQ(shared.count(0, name + 1), 8U);
  }
}

TEST(shares_hold_where_every_page_is_used) {
  Shared shared(4096, 1024);
  auto& engine = shared.shares.open();
  for (uint64_t first = 0; first < 8192; first += 64) {
    shared.publish(engine, names(first, first + 64));
    for (uint64_t name = 0; name < first; ++name) {
      if (contains(*shared.pool, name)) shared.touch(name);
    }
    CHECK(shared.count(0, first + 64) <= 1024);
    CHECK_EQ(shared.count(first, first + 64), 64U);
  }
}

TEST(shares_keep_the_front_of_a_batch_that_is_larger) {
  Shared shared(64, 8);
  auto& engine = shared.shares.open();
  const auto outcome = shared.publish(engine, names(0, 12));
  CHECK_EQ(outcome.n_admitted, 8U);
  CHECK_EQ(shared.count(0, 8), 8U);
  CHECK_EQ(shared.publish(engine, {100}, 9 * kGranule).n_admitted, 0U);  // one that is larger by itself
  CHECK_EQ(shared.count(0, 8), 8U);                                      // nothing has gone for it
}

TEST(shares_are_not_used_by_what_is_there_already) {
  Shared shared(64, 8);
  auto& first = shared.shares.open();
  auto& second = shared.shares.open();
  shared.publish(first, names(0, 8));
  for (int round = 0; round < 5; ++round) {
    CHECK_EQ(shared.publish(first, names(0, 8)).count(PoolStatus::kExists), 8U);
    CHECK_EQ(shared.publish(second, names(0, 8)).count(PoolStatus::kExists), 8U);
  }
  CHECK_EQ(shared.shares.n_taken_out(), 0U);
  shared.publish(second, names(100, 108));  // it has been charged for none of the first's
  CHECK_EQ(shared.count(0, 8) + shared.count(100, 108), 16U);
  CHECK_EQ(shared.publish(first, names(0, 8), 2 * kGranule).count(PoolStatus::kOtherLength), 8U);
  CHECK_EQ(shared.shares.n_taken_out(), 0U);
  CHECK_EQ(shared.publish(first, names(8, 16)).count(PoolStatus::kStored), 8U);  // nothing was left in flight
}

TEST(shares_of_who_has_left_go_to_the_next) {
  Shared shared(64, 16);
  auto& quiet = shared.shares.open();
  shared.publish(quiet, names(0, 16));
  for (uint64_t life = 1; life < 50; ++life) {
    auto& engine = shared.shares.open();
    shared.publish(engine, names(life * 100, life * 100 + 16));
    shared.shares.leave(engine);
    CHECK_EQ(shared.count(100, life * 100 + 16), 16U);
  }
  CHECK_EQ(shared.count(0, 16), 16U);
  CHECK_EQ(shared.count(4900, 4916), 16U);  // they outlive it
}

TEST(shares_leave_pinned_pages_where_they_are) {
  Shared shared(64, 8);
  auto& engine = shared.shares.open();
  shared.publish(engine, names(0, 8));
  std::vector<uint64_t> tickets;
  for (uint64_t name = 0; name < 6; ++name) tickets.push_back(pin(*shared.pool, name, 1000));
  CHECK_EQ(shared.publish(engine, names(8, 12)).n_admitted, 2U);
  CHECK_EQ(shared.count(0, 6), 6U);
  for (const uint64_t ticket : tickets) CHECK(unpin(*shared.pool, ticket));
  CHECK_EQ(shared.publish(engine, names(12, 20)).n_admitted, 8U);
  CHECK_EQ(shared.count(0, 20), 8U);
}

TEST(shares_forget_what_the_pool_has_taken_out) {
  Shared shared(64, 64);
  std::vector<EngineShares::Account*> engines;
  for (int i = 0; i < 8; ++i) engines.push_back(&shared.shares.open());
  for (uint64_t first = 0; first < 8000; first += 4) {
    shared.publish(*engines[first / 64 % 8], names(first, first + 4));
    CHECK(shared.shares.n_charges() <= 2 * 64);
  }
  CHECK_EQ(shared.shares.n_taken_out(), 0U);  // what was new to the pool went for what was old there
}

// Each page that goes was its publisher's, and goes when he publishes: the pool has room for all shares.
TEST(shares_of_others_are_never_touched) {
  constexpr size_t kEngines = 4, kShare = 32;
  std::mt19937_64 chance(p2pkv::test::seed("shares_of_others"));
  for (int life = 0; life < 20; ++life) {
    // Pages of up to three granules leave gaps that none fits.
    Shared shared(kEngines * kShare * 4, kShare);
    std::vector<EngineShares::Account*> accounts;
    for (size_t i = 0; i < kEngines; ++i) accounts.push_back(&shared.shares.open());
    std::vector<std::map<uint64_t, size_t>> stored(kEngines);  // names and granules, by engine
    for (int step = 0; step < 400; ++step) {
      const size_t engine = chance() % kEngines;
      const size_t n_granules = 1 + chance() % 3;
      std::set<uint64_t> wanted;
      for (size_t i = 1 + chance() % 16; i > 0; --i) wanted.insert(chance() % 400 * 4 + n_granules);
      const std::vector<uint64_t> batch(wanted.begin(), wanted.end());
      const auto outcome = shared.publish(*accounts[engine], batch, n_granules * kGranule);
      CHECK_EQ(outcome.n_admitted, batch.size() * n_granules <= kShare ? batch.size() : outcome.n_admitted);
      for (size_t other = 0; other < kEngines; ++other) {
        for (auto page = stored[other].begin(); page != stored[other].end();) {
          if (contains(*shared.pool, page->first)) {
            ++page;
            continue;
          }
          CHECK_EQ(other, engine);
          page = stored[other].erase(page);
        }
      }
      size_t n_used = 0;
      for (size_t i = 0; i < outcome.n_admitted; ++i) {
        CHECK(outcome.statuses[i] == PoolStatus::kStored || outcome.statuses[i] == PoolStatus::kExists);
        if (outcome.statuses[i] == PoolStatus::kStored) stored[engine][batch[i]] = n_granules;
      }
      for (const auto& [name, granules] : stored[engine]) n_used += granules;
      CHECK(n_used <= kShare);
      if (chance() % 4 == 0 && !stored[engine].empty()) {
        const uint64_t name = stored[engine].begin()->first;
        chance() % 2 == 0 ? shared.touch(name) : static_cast<void>(retract(*shared.pool, name));
        if (!contains(*shared.pool, name)) stored[engine].erase(name);
      }
    }
  }
}
