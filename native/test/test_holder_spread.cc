// Which of several holders of a page a fetch reads first.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "cache/holder_spread.h"
#include "check.h"
#include "holder_world.h"
#include "seed.h"

namespace {

using p2pkv::HolderSpread;
using p2pkv::Location;
using p2pkv::Status;
using p2pkv::test::kBoot;
using p2pkv::test::kStopped;
using World = p2pkv::test::HolderWorld;

constexpr int kFetches = 8000;

std::vector<Location> holders_of(const std::vector<uint64_t>& owners) {
  std::vector<Location> holders;
  for (const uint64_t owner : owners) holders.push_back(World::at(owner));
  return holders;
}

// What part of many fetches, of several readers, is read from each of these.
std::map<uint64_t, double> parts_of(const std::vector<uint64_t>& owners,
                                    const std::map<uint64_t, int64_t>& usual_ns, uint64_t readers) {
  const std::vector<Location> holders = holders_of(owners);
  std::map<uint64_t, double> parts;
  for (int fetch = 0; fetch < kFetches; ++fetch) {
    const uint64_t draw = (readers + static_cast<uint64_t>(fetch % 4)) * 0x1234'5678'9abc'def1 +
                          static_cast<uint64_t>(fetch / 4);  // as node keys, and their fetches, are
    HolderSpread spread(draw, [&](uint64_t owner, uint64_t) { return usual_ns.at(owner); });
    parts[holders[spread.choose(holders.data(), holders.size())].owner] += 1.0 / kFetches;
  }
  return parts;
}

TEST(spread_gives_holders_that_are_alike_the_same) {
  const uint64_t readers = p2pkv::test::seed("spread");
  for (const auto& parts : {
           parts_of({1, 2, 3, 4}, {{1, 0}, {2, 0}, {3, 0}, {4, 0}}, readers),
           parts_of({1, 2, 3, 4}, {{1, 1000}, {2, 1900}, {3, 1500}, {4, 0}}, readers),  // 4: not known
       }) {
    for (uint64_t owner = 1; owner <= 4; ++owner) CHECK(parts.at(owner) > 0.20 && parts.at(owner) < 0.30);
  }
}

TEST(spread_gives_slower_holders_less_and_never_nothing) {
  const uint64_t readers = p2pkv::test::seed("spread_slower");
  const auto parts = parts_of({1, 2, 3}, {{1, 1000}, {2, 8000}, {3, 1'000'000'000}}, readers);
  CHECK(parts.at(1) > 0.73 && parts.at(1) < 0.84);  // 1 / (1 + 1/4 + 1/64)
  CHECK(parts.at(2) > 0.15 && parts.at(2) < 0.25);
  CHECK(parts.at(3) > 0.002 && parts.at(3) < 0.04);
}

TEST(spread_reads_pages_that_the_same_nodes_hold_from_one_of_them) {
  std::mt19937_64 random(p2pkv::test::seed("spread_batch"));
  for (int fetch = 0; fetch < 200; ++fetch) {
    HolderSpread spread(random(),
                        [](uint64_t owner, uint64_t) { return static_cast<int64_t>(1000 * owner); });
    std::vector<uint64_t> owners{1, 2, 3, 4};
    uint64_t chosen = 0;
    for (int page = 0; page < 16; ++page) {
      std::shuffle(owners.begin(), owners.end(), random);
      const auto holders = holders_of(owners);
      const uint64_t owner = holders[spread.choose(holders.data(), holders.size())].owner;
      CHECK(chosen == 0 || owner == chosen);
      chosen = owner;
    }
  }
}

TEST(spread_fetches_are_read_in_one_go_and_from_all_holders_in_turn) {
  World world;
  world.draw = p2pkv::test::seed("spread_fetches");
  constexpr int kRounds = 400;
  for (int round = 0; round < kRounds; ++round) {
    world.locate({{1, 2, 3, 4}, {2, 1, 3, 4}, {4, 3, 2, 1}, {1, 2, 3, 4}}, round % 2 == 0);
    world.read(20);
    CHECK_EQ(world.n_hits(), 4u);
    CHECK_EQ(world.batch->group_by_owner(p2pkv::test::kOwn).size(), 0u);  // all is settled
  }
  for (const auto& [peer, way, amount] : world.peers->traffic()) {
    if (peer > 4) continue;
    CHECK(amount.n_pages > 4 * kRounds / 8);  // a slow machine makes some of them look slower than they are
    CHECK(amount.n_pages < 4 * kRounds / 2);
  }
}

TEST(spread_holders_that_fail_are_made_up_for_by_who_was_named_first) {
  World world;
  world.draw = p2pkv::test::seed("spread_fail");
  world.behave(2, {Status::kRejected});
  world.behave(3, kStopped);
  world.behave(4, {Status::kPeerLost});
  for (int round = 0; round < 40; ++round) {
    world.locate({{1, 2, 3, 4}, {1, 4}, {1, 2}, {1}});
    CHECK(world.read(20) < 10);
    CHECK_EQ(world.n_hits(), 4u);
    world.n_stale();
  }
}

TEST(spread_pages_that_nobody_else_has_are_read_where_they_are) {
  World world;
  world.draw = 1;
  world.others.put(p2pkv::test::key_of(0), holders_of({2}).data(), 1);
  world.locate({{1}, {1}});  // only one is named any more
  CHECK(!world.others.may_know(p2pkv::test::key_of(0)));
  world.read(20);
  CHECK_EQ(world.n_hits(), 2u);
  for (const auto& [peer, way, amount] : world.peers->traffic())
    CHECK_EQ(amount.n_pages, peer == 1 ? 2u : 0u);
}

}  // namespace
