// Reads that are late, or fail, and other holders of their pages: what is found, what is left, and that what
// was left writes nothing any more.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "holder_world.h"
#include "keys.h"
#include "seed.h"

namespace {

using p2pkv::Deadline;
using p2pkv::FetchBatch;
using p2pkv::Hedges;
using p2pkv::Key;
using p2pkv::Piece;
using p2pkv::Status;
using p2pkv::test::kBoot;
using p2pkv::test::key_of;
using p2pkv::test::kPage;
using p2pkv::test::kStopped;
using World = p2pkv::test::HolderWorld;

// A machine that stands still for the rest of a call's time says nothing of what is done in that: then it is
// done again. Each attempt returns whether it was in time.
template <typename Attempt>
void one_is_in_time(const Attempt& attempt) {
  for (int i = 0; i < 5; ++i) {
    if (attempt()) return;
  }
  CHECK(false);
}

TEST(late_holders_are_left_for_the_next) {
  World world;
  world.warm({1, 2, 3}, {{1}, {2}, {3}});  // it is the read that is late, and not the way to its holder
  world.behave(1, kStopped);
  world.locate({{1, 2}, {1, 3}, {2}, {1, 2}});
  CHECK(world.read(20) < 10);
  CHECK_EQ(world.n_hits(), 4u);
  CHECK_EQ(world.hedges.counts()[Hedges::kLate], 1u);
  for (const auto& [peer, way, amount] : world.peers->traffic()) {
    CHECK_EQ(amount.n_late, peer == 1 ? 1u : 0u);
    if (peer == 1) CHECK(amount.seconds > 0);  // the time that was lost with it is its own
  }
  // For a while the next ones need not find out; on a slow machine they do.
  world.locate({{1, 2}, {1, 3}});
  world.read(20);
  CHECK_EQ(world.n_hits(), 2u);
  CHECK_EQ(world.hedges.counts()[Hedges::kLate] + world.hedges.counts()[Hedges::kSlow], 2u);
  CHECK_EQ(world.n_stale(), 0u);
}

TEST(late_holders_are_the_others_of_who_was_found_instead) {
  World world;
  world.behave(1, kStopped);
  world.locate({{1, 2}});
  world.read(20);
  CHECK_EQ(world.n_hits(), 1u);
  // It goes on, and the other one stops: where the page was found, both of them are known.
  world.behave(1, {});
  world.behave(2, kStopped);
  world.peers->discard(world.peers->borrow({2, kBoot}, Deadline::after(5)));
  world.batch = std::make_unique<FetchBatch>(std::vector<Key>{key_of(0)}, std::vector<Piece>{{0, kPage}},
                                             std::vector<int32_t>{0}, 1);
  CHECK_EQ(world.batch->locate_cached(&world.cache, &world.shard), 1u);
  CHECK_EQ(world.batch->location(0).owner, 2u);
  CHECK(world.read(20) < 10);
  CHECK_EQ(world.n_hits(), 1u);
}

TEST(late_holders_are_tried_again) {
  World world;
  world.behave(1, {Status::kOk, std::chrono::milliseconds(300)});  // far beyond what is late at first
  world.behave(2, {Status::kPeerLost});
  world.behave(3, {Status::kRejected});
  world.locate({{1, 2, 3}});
  world.read(60);
  CHECK_EQ(world.n_hits(), 1u);
}

TEST(late_holders_that_are_all_slow_have_time_in_turn) {
  World world;
  for (const uint64_t node : {1, 2}) world.behave(node, {Status::kOk, std::chrono::milliseconds(400)});
  world.locate({{1, 2}});
  world.read(60);
  CHECK_EQ(world.n_hits(), 1u);
}

// Of holders that were never read, or seldom, it is guessed when they are late: in a short call too late.
TEST(late_holders_that_are_not_known_leave_time_for_the_next) {
  for (const auto& [behaviour, seconds] : {std::pair(p2pkv::test::kDeaf, 0.03), std::pair(kStopped, 0.015)}) {
    World world;
    world.behave(2, behaviour);
    world.locate({{1}});
    world.read(20);
    int n_found = 0;
    for (int call = 0; call < 40; ++call) {
      world.locate({{2, 1}});
      world.read(seconds);
      n_found += world.is_hit(0) ? 1 : 0;
    }
    CHECK(n_found > 10);  // of 40: on a busy machine some such calls are over before they begin
  }
}

// The first one is left soon, since it is not known; the last one that is left has the rest of the time.
TEST(late_holders_that_all_take_long_bring_their_pages_in_time) {
  int n_found = 0;
  for (int call = 0; call < 20; ++call) {
    World world;
    world.locate({{1}, {2}});
    world.read(20);
    for (const uint64_t node : {1, 2}) world.behave(node, {Status::kOk, std::chrono::milliseconds(15)});
    world.locate({{1, 2}});
    world.read(0.04);
    n_found += world.is_hit(0) ? 1 : 0;
  }
  CHECK(n_found > 10);  // of 20: on a busy machine some such calls are over before they begin
}

TEST(late_holders_that_cannot_be_reached_for_a_moment_stay_known) {
  World world;
  world.suspect(2, true);
  world.locate({{2, 1}});
  world.read(20);
  CHECK(world.is_hit(0));
  world.suspect(2, false);
  world.behave(1, kStopped);
  world.peers->change({}, {1});  // so that its connection goes
  world.peers->change({{{1, kBoot}, true, {0}}}, {});
  const std::vector<Key> keys{key_of(0)};
  world.batch =
      std::make_unique<FetchBatch>(keys, std::vector<Piece>{{0, kPage}}, std::vector<int32_t>(1), 1);
  CHECK_EQ(world.batch->locate_cached(&world.cache, &world.shard), 1u);  // at the one where it was found
  world.read(20);
  CHECK(world.is_hit(0));
}

TEST(late_holders_are_not_left_where_nobody_else_is_known) {
  World world;
  world.behave(1, {Status::kOk, std::chrono::milliseconds(300)});
  world.locate({{1}, {2}});
  world.read(60, true);
  CHECK_EQ(world.n_hits(), 2u);
  CHECK_EQ(world.hedges.counts()[Hedges::kLate], 0u);
}

TEST(lost_and_stale_holders_are_made_up_for_at_once) {
  World world;
  world.behave(1, {Status::kPeerLost});
  world.behave(2, {Status::kRejected});
  world.locate({{1, 3}, {2, 3}, {2, 1, 4}, {2}});
  CHECK(world.read(20) < 10);
  CHECK(world.is_hit(0) && world.is_hit(1) && world.is_hit(2) && !world.is_hit(3));
  CHECK(!world.batch->is_over());
  CHECK_EQ(world.n_stale(), 3u);  // two of pages that were found elsewhere
  CHECK_EQ(world.n_stale(), 0u);
}

TEST(hedges_are_a_share_of_the_reads) {
  World world;
  Hedges& hedges = world.hedges;
  int n_taken = 0;
  const auto take_all = [&] {
    for (int i = 0; i < 1000; ++i) n_taken += hedges.take() ? 1 : 0;
  };
  take_all();
  CHECK_EQ(n_taken, static_cast<int>(Hedges::kBurst));
  for (int i = 0; i < 10 * Hedges::kReadsAHedge; ++i) hedges.note_read();
  take_all();
  CHECK_EQ(n_taken, static_cast<int>(Hedges::kBurst) + 10);
}

TEST(hedges_that_are_used_up_leave_a_late_holder_a_quarter_of_the_time) {
  one_is_in_time([] {
    World world;
    for (int64_t i = 0; i < Hedges::kBurst; ++i) CHECK(world.hedges.take());
    world.behave(1, kStopped);
    world.locate({{1, 2}});
    const double seconds = world.read(2);
    CHECK(seconds > 0.4);
    if (seconds >= 1.9) return false;
    CHECK_EQ(world.n_hits(), 1u);
    CHECK_EQ(world.hedges.counts()[Hedges::kOverdue], 1u);
    return true;
  });
}

TEST(late_pages_that_the_cache_located_are_looked_up_again_at_half_the_time) {
  one_is_in_time([] {
    World world;
    world.behave(1, kStopped);
    size_t n_worth = 0;
    world.locate({{1}, {2}}, true);
    const double seconds = world.read(1, true);
    CHECK_EQ(world.n_stale(&n_worth), 0u);
    const bool is_in_time = seconds < 0.95;
    CHECK(!is_in_time || n_worth == 1);
    world.locate({{1}, {2}}, false);
    CHECK(world.read(1, true) > 0.95);
    CHECK_EQ(world.n_stale(&n_worth), 0u);
    CHECK_EQ(n_worth, 0u);
    return is_in_time;
  });
}

TEST(pages_beside_a_late_one_are_looked_up_again_at_half_the_time) {
  one_is_in_time([] {
    World world;
    world.behave(1, kStopped);
    world.behave(2, {Status::kRejected});
    world.locate({{1}, {2}});
    if (world.read(1, true) >= 0.95) return false;
    size_t n_worth = 0;
    CHECK_EQ(world.n_stale(&n_worth), 1u);
    CHECK_EQ(n_worth, 2u);
    return true;
  });
}

// Holders are stopped, lost, stale, slow and damaged at random; whatever they are, no read may write where
// another one does, and a page that one of its holders has at once is a hit.
TEST(late_holders_hunt) {
  const uint64_t seed = p2pkv::test::seed("late_holders_hunt");
  std::mt19937_64 random(seed);
  for (int round = 0; round < 12; ++round) {
    World world;
    std::set<uint64_t> there;
    for (uint64_t node = 1; node <= World::kNodes; ++node) {
      switch (random() % 6) {
        case 0:
          world.behave(node, kStopped);
          break;
        case 1:
          world.behave(node, {Status::kPeerLost, std::chrono::microseconds(random() % 2000)});
          break;
        case 2:
          world.behave(node, {Status::kRejected, std::chrono::microseconds(random() % 2000)});
          break;
        default:
          world.behave(node, {Status::kOk, std::chrono::microseconds(random() % 5000)});
          there.insert(node);
      }
    }
    std::vector<std::vector<uint64_t>> holders;
    for (size_t page = 0; page < 1 + random() % 12; ++page) {
      std::vector<uint64_t> nodes;
      for (uint64_t node = 1; node <= World::kNodes; ++node) nodes.push_back(node);
      std::shuffle(nodes.begin(), nodes.end(), random);
      nodes.resize(1 + random() % 4);
      holders.push_back(nodes);
    }
    bool is_any_lost = false;
    for (const auto& nodes : holders)
      is_any_lost |=
          std::none_of(nodes.begin(), nodes.end(), [&](auto node) { return there.contains(node); });
    world.locate(holders, random() % 2 == 0);
    if (random() % 2 == 0) world.draw = random();
    const double limit = is_any_lost ? 2.0 : 20.0;
    const double seconds = world.read(limit, random() % 2 == 0);
    CHECK(seconds < limit + 5);
    for (size_t page = 0; page < holders.size(); ++page) {
      const bool is_there = std::any_of(holders[page].begin(), holders[page].end(),
                                        [&](uint64_t node) { return there.contains(node); });
      CHECK(!is_there || world.is_hit(page));
      CHECK(is_there || !world.is_hit(page));
    }
  }
}

}  // namespace
