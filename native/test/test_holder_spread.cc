// Which of several holders of a page a fetch reads first.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "cache/holder_spread.h"
#include "check.h"
#include "holder_world.h"
#include "seed.h"

namespace {

using p2pkv::Deadline;
using p2pkv::HolderChoice;
using p2pkv::HolderSpread;
using p2pkv::Location;
using p2pkv::Pace;
using p2pkv::PeerConnections;
using p2pkv::PeerId;
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

constexpr uint64_t kBytes = 1 << 16;

PeerConnections::Standing standing_of(int64_t usual_ns, bool is_connected = true) {
  auto pace = std::make_shared<Pace>();
  for (int i = 0; usual_ns > 0 && i < 8; ++i) pace->note(kBytes, std::chrono::nanoseconds(usual_ns));
  return {is_connected, true, pace};
}

using Standings = std::map<uint64_t, PeerConnections::Standing>;

HolderSpread::Look look_at(const Standings& standings) {
  return [&standings](const std::vector<PeerId>& peers) {
    std::vector<PeerConnections::Standing> found;
    for (const PeerId& peer : peers) found.push_back(standings.at(peer.key));
    return found;
  };
}

// As node keys, and their fetches, are.
uint64_t draw_of(uint64_t readers, int fetch) {
  return (readers + static_cast<uint64_t>(fetch % 4)) * 0x1234'5678'9abc'def1 +
         static_cast<uint64_t>(fetch / 4);
}

// What part of many fetches, of several readers, is read from each of these.
std::map<uint64_t, double> parts_of(const std::map<uint64_t, int64_t>& usual_ns, uint64_t readers) {
  Standings standings;
  std::vector<uint64_t> owners;
  for (const auto& [owner, ns] : usual_ns) {
    standings[owner] = standing_of(ns);
    owners.push_back(owner);
  }
  const std::vector<Location> holders = holders_of(owners);
  std::map<uint64_t, double> parts;
  for (int fetch = 0; fetch < kFetches; ++fetch) {
    HolderSpread spread(draw_of(readers, fetch), look_at(standings));
    spread.know(holders, kBytes);
    parts[holders[spread.choose(holders.data(), holders.size())].owner] += 1.0 / kFetches;
  }
  return parts;
}

TEST(spread_gives_holders_that_are_alike_the_same) {
  const uint64_t readers = p2pkv::test::seed("spread");
  for (const auto& parts : {
           parts_of({{1, 0}, {2, 0}, {3, 0}, {4, 0}}, readers),
           parts_of({{1, 1000}, {2, 1900}, {3, 1500}, {4, 0}}, readers),  // 4: not known
       }) {
    for (uint64_t owner = 1; owner <= 4; ++owner) CHECK(parts.at(owner) > 0.20 && parts.at(owner) < 0.30);
  }
}

TEST(spread_gives_slower_holders_less_and_never_nothing) {
  const uint64_t readers = p2pkv::test::seed("spread_slower");
  const auto parts = parts_of({{1, 1000}, {2, 8000}, {3, 1'000'000'000}}, readers);
  CHECK(parts.at(1) > 0.73 && parts.at(1) < 0.84);  // 1 / (1 + 1/4 + 1/64)
  CHECK(parts.at(2) > 0.15 && parts.at(2) < 0.25);
  CHECK(parts.at(3) > 0.002 && parts.at(3) < 0.04);
}

TEST(spread_is_told_by_reads_of_other_sizes_what_they_can_tell) {
  const uint64_t readers = p2pkv::test::seed("spread_sizes");
  const std::vector<Location> holders = holders_of({1, 2, 3});
  Standings standings{{1, standing_of(0)}, {2, standing_of(0)}, {3, standing_of(0)}};
  const auto note = [&](uint64_t owner, uint64_t nbytes, std::chrono::microseconds took) {
    auto pace = std::make_shared<Pace>();
    for (int i = 0; i < 8; ++i) pace->note(nbytes, took);
    standings[owner].pace = pace;
  };
  // Each has pages that it alone has: what is read from two of them is of other sizes than what is shared.
  note(1, 16 * kBytes, std::chrono::microseconds(1000));
  note(2, kBytes, std::chrono::microseconds(20'000));       // slow for certain
  note(3, 64 * kBytes, std::chrono::microseconds(20'000));  // maybe as fast as the first
  std::map<uint64_t, double> parts;
  for (int fetch = 0; fetch < kFetches; ++fetch) {
    HolderSpread spread(draw_of(readers, fetch), look_at(standings));
    spread.know(holders, kBytes);
    parts[holders[spread.choose(holders.data(), holders.size())].owner] += 1.0 / kFetches;
  }
  CHECK(parts[1] > 0.42 && parts[1] < 0.53);  // 1 / (1 + 1 + 1/10)
  CHECK(parts[2] > 0.02 && parts[2] < 0.08);
  CHECK(parts[3] > 0.42 && parts[3] < 0.53);
}

TEST(spread_draws_among_those_that_are_connected) {
  const uint64_t readers = p2pkv::test::seed("spread_connected");
  const std::vector<Location> holders = holders_of({1, 2, 3, 4, 5});
  const std::vector<Location> page(holders.begin(), holders.begin() + 4);
  Standings standings{{1, standing_of(0, false)}, {2, standing_of(0)}, {3, standing_of(0)}};
  standings[4] = standings[5] = {false, false, std::make_shared<Pace>()};
  std::map<uint64_t, int> n_read, n_to_connect;
  for (int fetch = 0; fetch < kFetches; ++fetch) {
    HolderSpread spread(draw_of(readers, fetch), look_at(standings));
    spread.know(holders, kBytes);
    ++n_read[page[spread.choose(page.data(), page.size())].owner];
    for (const PeerId& peer : spread.to_connect()) ++n_to_connect[peer.key];
  }
  CHECK(n_read[2] > kFetches * 2 / 5 && n_read[3] > kFetches * 2 / 5);
  CHECK_EQ(n_read[2] + n_read[3], kFetches);
  CHECK(n_to_connect[1] > kFetches / 4);  // as often as it is drawn
  CHECK_EQ(n_to_connect.size(), 1u);      // and nobody that can't be reached

  // One that was late a moment ago is passed over, as it would be if it was named first.
  auto late = std::make_shared<Pace>();
  for (int i = 0; i < 6; ++i) late->was_late();
  standings[3].pace = late;
  bool has_avoided = false;
  for (int fetch = 0; fetch < 100; ++fetch) {
    late->was_late();  // for a second
    HolderSpread spread(draw_of(readers, fetch), look_at(standings));
    spread.know(holders, kBytes);
    const uint64_t owner = page[spread.choose(page.data(), page.size())].owner;
    CHECK(owner == 2 || !late->is_slow());
    has_avoided = has_avoided || spread.has_avoided_slow();
  }
  CHECK(has_avoided);

  // Where nobody is connected, who was named first is: the next fetch may be long after.
  standings[2].is_connected = standings[3].is_connected = false;
  HolderSpread spread(readers, look_at(standings));
  spread.know(holders, kBytes);
  CHECK_EQ(spread.choose(page.data(), page.size()), 0u);
  CHECK(spread.to_connect().empty());
}

TEST(spread_connects_to_a_few_at_a_time_and_knows_those_that_are_told_later) {
  const uint64_t readers = p2pkv::test::seed("spread_few");
  constexpr int kTurns = 100;
  Standings standings{{100, standing_of(0)}};
  for (uint64_t owner = 1; owner <= 40; ++owner) standings[owner] = standing_of(0, false);
  int n_to_some = 0;
  for (int fetch = 0; fetch < kTurns; ++fetch) {
    HolderSpread spread(draw_of(readers, fetch), look_at(standings));
    for (uint64_t owner = 1; owner <= 40; ++owner) {
      const std::vector<Location> page = holders_of({100, owner});
      spread.know(page, kBytes);
      CHECK_EQ(page[spread.choose(page.data(), page.size())].owner, 100u);
    }
    CHECK(spread.to_connect().size() <= 4);
    n_to_some += spread.to_connect().empty() ? 0 : 1;
  }
  CHECK(n_to_some > kTurns / 2);  // in one fetch of 41 the one that is connected is drawn before all others
}

TEST(spread_reads_pages_that_the_same_nodes_hold_from_one_of_them) {
  std::mt19937_64 random(p2pkv::test::seed("spread_batch"));
  Standings standings;
  for (int64_t owner = 1; owner <= 4; ++owner) standings[owner] = standing_of(1000 * owner);
  for (int fetch = 0; fetch < 200; ++fetch) {
    HolderSpread spread(random(), look_at(standings));
    spread.know(holders_of({1, 2, 3, 4}), kBytes);
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

// Fetches until there is a connection to each of these: to all but one, calls make none themselves.
void warm(World& world, const std::vector<uint64_t>& owners) {
  world.warm(owners, {owners});
}

std::map<uint64_t, uint64_t> pages_read(const World& world) {
  std::map<uint64_t, uint64_t> n_pages;
  for (const auto& [peer, way, amount] : world.peers->traffic()) n_pages[peer] = amount.n_pages;
  return n_pages;
}

TEST(spread_fetches_are_read_in_one_go_and_from_all_holders_in_turn) {
  World world;
  world.draw = p2pkv::test::seed("spread_fetches");
  warm(world, {1, 2, 3, 4});
  auto before = pages_read(world);
  constexpr int kRounds = 400;
  for (int round = 0; round < kRounds; ++round) {
    world.locate({{1, 2, 3, 4}, {2, 1, 3, 4}, {4, 3, 2, 1}, {1, 2, 3, 4}}, round % 2 == 0);
    world.read(20);
    CHECK_EQ(world.n_hits(), 4u);
    CHECK_EQ(world.batch->group_by_owner(p2pkv::test::kOwn).size(), 0u);  // all is settled
  }
  for (const auto& [peer, n_pages] : pages_read(world)) {
    if (peer > 4) continue;
    CHECK(n_pages - before[peer] > 4 * kRounds / 8);  // a slow machine makes some look slower than they are
    CHECK(n_pages - before[peer] < 4 * kRounds / 2);
  }
}

// The one that has stopped is not known to have: no fetch finds out by waiting for a connection to it.
TEST(spread_fetches_wait_for_nobody_who_is_not_connected) {
  World world;
  world.draw = p2pkv::test::seed("spread_cold");
  world.locate({{1}});
  world.read(20);
  world.behave(2, p2pkv::test::kDeaf);
  for (int round = 0; round < 40; ++round) {
    world.locate({{1, 2}, {2, 1}}, round % 2 == 0);
    world.read(20);
    CHECK_EQ(world.n_hits(), 2u);
  }
  CHECK_EQ(pages_read(world)[1], 81u);
  for (const uint64_t n : world.hedges.counts()) CHECK_EQ(n, 0u);
}

TEST(spread_holders_that_fail_are_made_up_for_by_who_was_named_first) {
  World world;
  world.draw = p2pkv::test::seed("spread_fail");
  warm(world, {1, 2, 3, 4});
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
  warm(world, {1, 2});
  world.locate({{1, 2}, {1, 2}});
  CHECK(world.others.may_know(p2pkv::test::key_of(0)));
  const auto n_of_second = pages_read(world)[2];
  for (int round = 0; round < 20; ++round) {
    world.locate({{1}, {1}});  // only one is named any more
    world.read(20);
    CHECK_EQ(world.n_hits(), 2u);
  }
  CHECK_EQ(pages_read(world)[2], n_of_second);
}

TEST(spread_leaves_what_is_said_to_be_here_or_proves_nothing_to_be_taken_for_stale) {
  World world;
  HolderChoice choice(world.others, world.shard, p2pkv::test::kOwn, [](uint64_t, uint64_t) { return 0u; });
  const auto key = p2pkv::test::key_of(0);
  world.others.put(key, holders_of({2}).data(), 1);
  CHECK(choice.may_choose(key, World::at(1)));
  CHECK(!choice.may_choose(key, World::at(p2pkv::test::kOwn)));
  Location unproven = World::at(1);
  unproven.word_offset = p2pkv::kNoWord;
  CHECK(!choice.may_choose(key, unproven));
}

}  // namespace
