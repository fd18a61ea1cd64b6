// Shares of engines in a pool: who is above his own takes out his own pages, the oldest first.
#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "seed.h"
#include "shared_pool.h"

TEST(shares_who_publishes_without_end_takes_out_his_own_pages_alone) {
  Shared shared(64, 24);
  const auto quiet = shared.open();
  const auto greedy = shared.open();
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
  CHECK_EQ(shared.n_evicted(), 2001U - 24U);
  CHECK_EQ(shared.shares.largest_charge(), 24U * kGranule);
}

TEST(shares_a_page_that_was_used_since_has_a_second_chance) {
  Shared shared(64, 8);
  const auto engine = shared.open();
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
  const auto engine = shared.open();
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
  const auto engine = shared.open();
  const auto outcome = shared.publish(engine, names(0, 12));
  CHECK_EQ(outcome.count(PoolStatus::kStored), 8U);
  CHECK_EQ(outcome.count(PoolStatus::kNoRoom), 4U);
  CHECK_EQ(shared.count(0, 8), 8U);
  // One that is larger by itself.
  CHECK_EQ(shared.publish(engine, {100}, 9 * kGranule).count(PoolStatus::kNoRoom), 1U);
  CHECK_EQ(shared.count(0, 8), 8U);  // nothing has gone for it
  CHECK_EQ(shared.pool->share_stats().refused_pages, 5U);
}

TEST(shares_are_not_used_by_what_is_there_already) {
  Shared shared(64, 8);
  const auto first = shared.open();
  const auto second = shared.open();
  shared.publish(first, names(0, 8));
  for (int round = 0; round < 5; ++round) {
    CHECK_EQ(shared.publish(first, names(0, 8)).count(PoolStatus::kExists), 8U);
    CHECK_EQ(shared.publish(second, names(0, 8)).count(PoolStatus::kExists), 8U);
  }
  CHECK_EQ(shared.n_evicted(), 0U);
  shared.publish(second, names(100, 108));  // it has been charged for none of the first's
  CHECK_EQ(shared.count(0, 8) + shared.count(100, 108), 16U);
  CHECK_EQ(shared.publish(first, names(0, 8), 2 * kGranule).count(PoolStatus::kOtherLength), 8U);
  CHECK_EQ(shared.n_evicted(), 0U);
  CHECK_EQ(shared.publish(first, names(8, 16)).count(PoolStatus::kStored), 8U);  // nothing was left in flight
}

TEST(shares_of_who_has_left_go_to_the_next) {
  Shared shared(64, 16);
  const auto quiet = shared.open();
  shared.publish(quiet, names(0, 16));
  for (uint64_t life = 1; life < 50; ++life) {
    const auto engine = shared.open();
    shared.publish(engine, names(life * 100, life * 100 + 16));
    shared.shares.leave(engine);
    CHECK_EQ(shared.count(100, life * 100 + 16), 16U);
  }
  CHECK_EQ(shared.count(0, 16), 16U);
  CHECK_EQ(shared.count(4900, 4916), 16U);  // they outlive it
}

TEST(shares_are_found_again_by_who_left_them) {
  Shared shared(256, 16);
  std::vector<PoolShare> left;
  for (uint64_t mark = 1; mark <= 4; ++mark) left.push_back(shared.open(mark));
  const auto twin = shared.open(4);  // somebody of the same name has one of his own
  for (size_t i = 0; i < 4; ++i) CHECK(twin.account != left[i].account);
  for (const PoolShare& share : left) shared.shares.leave(share);
  for (const uint64_t mark : {2, 4, 1, 3}) CHECK_EQ(shared.open(mark).account, left[mark - 1].account);
  shared.shares.leave(left[0]);
  shared.shares.leave(left[1]);
  // Who is not known has what was left longest ago: there are never more than engines.
  CHECK_EQ(shared.open(77).account, left[0].account);
  CHECK_EQ(shared.open(2).account, left[1].account);
  const auto nameless = shared.open(0);
  CHECK_EQ(nameless.account, twin.account + 1);
  shared.shares.leave(left[1]);
  shared.shares.leave(nameless);
  CHECK_EQ(shared.open(78).account, nameless.account);  // nobody comes back for that one
}

TEST(shares_that_a_page_does_not_fit_take_those_behind_it) {
  Shared shared(64, 8);
  const auto engine = shared.open();
  const Bytes bytes = bytes_of(1, 9 * kGranule);
  const std::vector<Key> keys = {key_of(0), key_of(1), key_of(2)};
  std::vector<Piece> pieces(3, piece_of(bytes));
  pieces[0].nbytes = pieces[2].nbytes = kGranule;
  std::vector<PoolStatus> statuses(3);
  std::vector<Location> locations(3);
  shared.pool->publish({3, 1, keys.data(), pieces.data()}, statuses.data(), locations.data(),
                       Deadline::after(30), nullptr, engine);
  CHECK(statuses == std::vector<PoolStatus>({PoolStatus::kStored, PoolStatus::kNoRoom, PoolStatus::kStored}));
  CHECK_EQ(shared.charged(engine), 2U);
  CHECK_EQ(shared.pool->share_stats().refused_pages, 1U);
}

TEST(shares_leave_pinned_pages_where_they_are) {
  Shared shared(64, 8);
  const auto engine = shared.open();
  shared.publish(engine, names(0, 8));
  std::vector<uint64_t> tickets;
  for (uint64_t name = 0; name < 6; ++name) tickets.push_back(pin(*shared.pool, name, 1000));
  CHECK_EQ(shared.publish(engine, names(8, 12)).count(PoolStatus::kStored), 2U);
  CHECK_EQ(shared.count(0, 6), 6U);
  for (const uint64_t ticket : tickets) CHECK(unpin(*shared.pool, ticket));
  CHECK_EQ(shared.publish(engine, names(12, 20)).count(PoolStatus::kStored), 8U);
  CHECK_EQ(shared.count(0, 20), 8U);
}

// What is charged is what is there, whoever has taken out what, as a count of the pool's pages says.
TEST(shares_are_charged_for_what_is_there) {
  constexpr size_t kEngines = 5;
  std::mt19937_64 chance(p2pkv::test::seed("shares_are_charged"));
  for (int life = 0; life < 20; ++life) {
    Shared shared(100, 40);  // together more than the pool: it takes out the oldest, too
    std::vector<PoolShare> engines;
    for (size_t i = 0; i < kEngines; ++i) engines.push_back(shared.open());
    std::map<uint64_t, std::pair<size_t, size_t>> stored;  // by name: the engine, and granules
    std::vector<uint64_t> tickets;
    for (int step = 0; step < 300; ++step) {
      const size_t engine = chance() % kEngines;
      const size_t n_granules = 1 + chance() % 5;
      std::set<uint64_t> wanted;
      for (size_t i = 1 + chance() % 6; i > 0; --i) wanted.insert(chance() % 100 * 8 + n_granules);
      const std::vector<uint64_t> batch(wanted.begin(), wanted.end());
      const auto outcome = shared.publish(engines[engine], batch, n_granules * kGranule);
      for (size_t i = 0; i < batch.size(); ++i) {
        if (outcome.statuses[i] == PoolStatus::kStored) stored[batch[i]] = {engine, n_granules};
      }
      if (!stored.empty()) {
        auto page = stored.lower_bound(chance() % 800);
        if (page == stored.end()) page = stored.begin();
        const uint64_t what = chance() % 8;
        if (what == 0) static_cast<void>(retract(*shared.pool, page->first));
        if (what == 1) publish(*shared.pool, 10'000 + chance() % 50, 3 * kGranule);  // nobody's
        if (what == 2 && contains(*shared.pool, page->first))
          tickets.push_back(pin(*shared.pool, page->first, 1000));
        if (what == 3 && !tickets.empty()) {
          unpin(*shared.pool, tickets.back());
          tickets.pop_back();
        }
        if (step % 100 == 99) {
          while (!tickets.empty()) {
            unpin(*shared.pool, tickets.back());
            tickets.pop_back();
          }
          if (chance() % 2 == 0) shared.pool->purge();
        }
      }
      std::vector<uint64_t> there(kEngines);
      for (auto at = stored.begin(); at != stored.end();) {
        const auto& [name, page] = *at;
        const bool is_there = contains(*shared.pool, name);
        if (is_there) there[page.first] += page.second;
        at = is_there ? std::next(at) : stored.erase(at);
      }
      for (size_t i = 0; i < kEngines; ++i) {
        // What was taken out and is held takes room until it is let go.
        CHECK(tickets.empty() ? shared.charged(engines[i]) == there[i]
                              : shared.charged(engines[i]) >= there[i]);
        CHECK(shared.charged(engines[i]) <= 40);
      }
    }
  }
}

TEST(shares_a_search_among_pinned_pages_ends) {
  constexpr uint64_t kPages = 20'000;
  Shared shared(3 * kPages, kPages);
  const auto engine = shared.open();
  shared.publish(engine, names(0, kPages));
  std::vector<uint64_t> tickets;
  for (uint64_t name = 0; name < kPages; ++name) tickets.push_back(pin(*shared.pool, name, 1000));
  CHECK_EQ(shared.publish(engine, names(kPages, kPages + 100)).count(PoolStatus::kNoRoom), 100U);
}

// Each page that goes was its publisher's, and goes when he publishes, whatever the sizes: the pool has room
// for all shares, and for hardly more. Only who grows may have others' go: for a share's worth of his pages,
// for as much as went of them otherwise, and for what he was refused while nothing of his was stored.
TEST(shares_of_others_are_never_touched) {
  constexpr size_t kEngines = 4, kShare = 64;
  std::mt19937_64 chance(p2pkv::test::seed("shares_of_others"));
  size_t n_stored = 0, n_refused = 0, n_outgrown = 0;
  for (int life = 0; life < 20; ++life) {
    Shared shared(kEngines * kShare + 16, kShare);
    std::vector<size_t> allowed(kEngines, kShare), cost(kEngines), in_a_row(kEngines);  // granules
    uint64_t n_cost = 0;                                                                // pages
    std::vector<PoolShare> accounts;
    for (size_t i = 0; i < kEngines; ++i) accounts.push_back(shared.open());
    std::vector<std::map<uint64_t, size_t>> stored(kEngines);  // names and granules, by engine
    for (int step = 0; step < 400; ++step) {
      const size_t engine = chance() % kEngines;
      const size_t n_granules = std::vector<size_t>{1, 1, 2, 3, 16}[chance() % 5];
      std::set<uint64_t> wanted;
      for (size_t i = 1 + chance() % (n_granules == 16 ? 2 : 16); i > 0; --i)
        wanted.insert(chance() % 400 * 32 + n_granules);
      const std::vector<uint64_t> batch(wanted.begin(), wanted.end());
      std::vector<bool> was_there;
      for (const uint64_t name : batch) was_there.push_back(contains(*shared.pool, name));
      const auto outcome = shared.publish(accounts[engine], batch, n_granules * kGranule);
      for (size_t other = 0; other < kEngines; ++other) {
        for (auto page = stored[other].begin(); page != stored[other].end();) {
          if (contains(*shared.pool, page->first)) {
            ++page;
            continue;
          }
          if (other != engine) {
            cost[engine] += page->second;
            allowed[other] += page->second;
            ++n_cost;
          }
          page = stored[other].erase(page);
        }
      }
      size_t n_used = 0;
      for (size_t i = 0; i < batch.size(); ++i) {
        if (outcome.statuses[i] == PoolStatus::kStored) stored[engine][batch[i]] = n_granules;
        // What it has already does not go for the rest of its own batch.
        CHECK(!was_there[i] || outcome.statuses[i] == PoolStatus::kExists);
        n_refused += outcome.statuses[i] == PoolStatus::kNoRoom ? 1 : 0;
      }
      if (outcome.count(PoolStatus::kStored) > 0) in_a_row[engine] = 0;
      if (outcome.count(PoolStatus::kNoRoom) > 0) in_a_row[engine] += n_granules;
      if (in_a_row[engine] >= kShare) {
        allowed[engine] += kShare;
        in_a_row[engine] = 0;
      }
      CHECK(cost[engine] <= allowed[engine]);
      n_stored += outcome.count(PoolStatus::kStored);
      for (const auto& [name, granules] : stored[engine]) n_used += granules;
      CHECK_EQ(n_used, shared.charged(accounts[engine]));
      CHECK(n_used <= kShare);
      if (chance() % 4 == 0 && !stored[engine].empty()) {
        const uint64_t name = stored[engine].begin()->first;
        chance() % 2 == 0 ? shared.touch(name) : static_cast<void>(retract(*shared.pool, name));
        if (!contains(*shared.pool, name)) {
          allowed[engine] += stored[engine][name];
          stored[engine].erase(name);
        }
      }
      CHECK_EQ(shared.n_outgrown(), n_cost);
    }
    n_outgrown += n_cost;
  }
  std::printf("%zu stored, %zu refused, %zu of others went\n", n_stored, n_refused, n_outgrown);
  CHECK(n_refused < n_stored / 20);
  CHECK(n_outgrown < n_stored / 400);
}
