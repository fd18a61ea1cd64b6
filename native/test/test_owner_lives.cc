// What a shard makes of the pages of an owner whose memory outlives its process.
#include <cstdint>
#include <vector>

#include "check.h"
#include "directory/owner_lives.h"
#include "directory/shard.h"
#include "keys.h"

namespace {

using p2pkv::Key;
using p2pkv::Location;
using p2pkv::OwnerLives;
using p2pkv::Shard;
using p2pkv::test::key_of;
using p2pkv::wire::DropEntry;
using p2pkv::wire::PutEntry;

constexpr uint64_t kOwner = 7;
constexpr uint64_t kGeneration = 42;
constexpr uint64_t kStranger = 9;

Location location_of(uint64_t boot) {
  return {kOwner, boot, 4096, 64, 8, kGeneration, 1, 0, p2pkv::kResident};
}

void put(Shard& shard, uint64_t boot, uint64_t sequence, uint32_t now = 100) {
  const PutEntry entry{key_of(1), sequence, location_of(boot)};
  CHECK_EQ(shard.put(&entry, 1, now), 0u);
}

void drop(Shard& shard, uint64_t boot, uint64_t sequence) {
  const DropEntry entry{key_of(1), sequence, kOwner, boot, kGeneration};
  shard.drop(&entry, 1, 100);
}

// The boot that the page's place is told under, 0 where it is not found; all ways to ask say the same.
uint64_t boot_of(Shard& shard) {
  const Key key = key_of(1);
  uint8_t found = 0;
  Location at{};
  shard.get(&key, 1, &found, &at);
  uint8_t n_named = 0;
  std::vector<Location> holders;
  shard.get_holders(&key, 1, 8, &n_named, &holders);
  CHECK_EQ(n_named, found);
  if (found == 0) return 0;
  CHECK_EQ(holders.front().boot, at.boot);
  CHECK_EQ(at.generation, kGeneration);
  return at.boot;
}

void sweep_all(Shard& shard, uint32_t first, uint32_t last) {
  for (uint32_t now = first; now <= last; ++now) {
    shard.confirm_view(now);
    for (size_t i = 0; i < Shard::kStripes; ++i) shard.sweep(now);
  }
}

TEST(owner_lives_places_of_an_earlier_boot_count_as_those_of_this_one) {
  Shard shard(1 << 12);
  shard.set_view({{kOwner, 5, 5}});
  put(shard, 5, 1);
  CHECK_EQ(boot_of(shard), 5u);
  shard.set_view({{kOwner, 9, 5}});
  CHECK_EQ(boot_of(shard), 9u);
  // A successor whose memory is another's has none of these.
  shard.set_view({{kOwner, 9, 9}});
  CHECK_EQ(boot_of(shard), 0u);
  shard.set_view({{kOwner, 9, 6}});
  CHECK_EQ(boot_of(shard), 0u);
}

TEST(owner_lives_what_others_said_is_told_under_the_boot_of_now) {
  Shard shard(1 << 12);
  shard.set_view({{kOwner, 9, 5}});
  std::vector<Location> said{location_of(4), location_of(5), location_of(7), location_of(9), location_of(10)};
  std::vector<uint8_t> found(said.size(), 1);
  shard.keep_present(said.data(), found.data(), said.size());
  CHECK(found == (std::vector<uint8_t>{0, 1, 1, 1, 0}));
  for (size_t i = 1; i < 4; ++i) CHECK_EQ(said[i].boot, 9u);
}

TEST(owner_lives_who_is_away_is_waited_for_and_not_found) {
  Shard shard(1 << 12);
  shard.set_view({{kOwner, 5, 5}});
  put(shard, 5, 1);
  shard.set_view({{kStranger, 1, 1}, {kOwner, 5, 5, true}});
  CHECK_EQ(boot_of(shard), 0u);
  sweep_all(shard, 101, 160);
  CHECK_EQ(shard.stats().entries, 1u);
  shard.set_view({{kStranger, 1, 1}, {kOwner, 9, 5}});
  CHECK_EQ(boot_of(shard), 9u);
  // Who comes back without these pages is not.
  shard.set_view({{kStranger, 1, 1}, {kOwner, 9, 9}});
  sweep_all(shard, 161, 220);
  CHECK_EQ(shard.stats().entries, 0u);
}

TEST(owner_lives_who_is_forgotten_is_waited_for_no_more) {
  Shard shard(1 << 12);
  shard.set_view({{kOwner, 5, 5}});
  put(shard, 5, 1);
  shard.set_view({{kOwner, 5, 5, true}});
  sweep_all(shard, 101, 160);
  shard.set_view(std::vector<OwnerLives::Life>{});
  sweep_all(shard, 161, 220);
  CHECK_EQ(shard.stats().entries, 0u);
}

TEST(owner_lives_a_successor_takes_back_what_the_life_before_put) {
  for (const uint64_t sequence : {0u, 1u}) {  // by a reader that found it stale, or by the owner itself
    Shard shard(1 << 12);
    shard.set_view({{kOwner, 9, 5}});
    put(shard, 5, 1000);
    drop(shard, 9, sequence);
    CHECK_EQ(boot_of(shard), 0u);
    put(shard, 5, 1000);  // a late retry
    CHECK_EQ(boot_of(shard), 0u);
    put(shard, 9, 2);
    CHECK_EQ(boot_of(shard), 9u);
  }
}

TEST(owner_lives_a_successor_takes_back_where_nobody_has_heard_of_it_yet) {
  for (const bool is_away : {false, true}) {
    Shard shard(1 << 12);
    shard.set_view({{kOwner, 5, 5, is_away}});
    put(shard, 5, 1000);
    drop(shard, 9, 1);
    shard.set_view({{kOwner, 9, 5}});
    CHECK_EQ(boot_of(shard), 0u);
    // A reader's word does not do that: it may have meant another memory.
    shard.set_view({{kOwner, 5, 5, is_away}});
    put(shard, 10, 1);
    drop(shard, 11, 0);
    shard.set_view({{kOwner, 11, 5}});
    CHECK_EQ(boot_of(shard), 11u);
  }
}

TEST(owner_lives_a_spare_holder_is_called_once_while_the_others_are_away) {
  Shard shard(1 << 12);
  std::vector<OwnerLives::Life> all, later;
  for (uint64_t owner = 1; owner <= 9; ++owner) {
    all.push_back({owner, 5, 5});
    later.push_back({owner, 5, 5, owner < 9});
  }
  shard.set_view(all);
  Location at = location_of(5);
  for (at.owner = 1; at.owner <= 9; ++at.owner) {
    const PutEntry entry{key_of(1), 1, at};
    shard.put(&entry, 1, 100);
  }
  shard.set_view(later);
  sweep_all(shard, 101, 160);
  const auto called = shard.take_called(100);
  CHECK_EQ(called.size(), 8u);  // one for each place
  CHECK_EQ(called.front().owner, 9u);
  CHECK_EQ(shard.stats().entries, 8u);
}

TEST(owner_lives_who_is_away_is_not_waited_for_where_there_is_no_room) {
  Shard shard(Shard::kStripes * 8);  // eight entries a stripe
  shard.set_view({{kOwner, 5, 5}});
  Location at = location_of(5);
  for (uint64_t name = 0; name < 8; ++name) {
    Key key = key_of(name);
    key.bytes[15] = 0;
    const PutEntry entry{key, 1, at};
    CHECK_EQ(shard.put(&entry, 1, 100), 0u);
  }
  shard.set_view({{kStranger, 1, 1}, {kOwner, 5, 5, true}});
  sweep_all(shard, 101, 160);
  CHECK(shard.stats().entries < 8u);
  CHECK(shard.stats().entries > 0u);
}

TEST(owner_lives_a_put_between_two_takings_back_does_not_come_back) {
  Shard shard(1 << 12);
  shard.set_view({{kOwner, 5, 5}});
  put(shard, 5, 1);
  drop(shard, 5, 2);
  drop(shard, 5, 4);
  put(shard, 5, 3);  // late
  CHECK_EQ(boot_of(shard), 0u);
  put(shard, 5, 5);
  CHECK_EQ(boot_of(shard), 5u);
}

TEST(owner_lives_the_life_before_takes_nothing_back_of_its_successor) {
  Shard shard(1 << 12);
  shard.set_view({{kOwner, 9, 5}});
  put(shard, 9, 1);
  drop(shard, 5, 1000);
  put(shard, 5, 1001);
  CHECK_EQ(boot_of(shard), 9u);
}

TEST(owner_lives_other_memory_has_nothing_to_do_with_it) {
  Shard shard(1 << 12);
  shard.set_view({{kOwner, 9, 9}});
  put(shard, 9, 1);
  drop(shard, 5, 0);
  drop(shard, 5, 1000);
  CHECK_EQ(boot_of(shard), 9u);
}

}  // namespace
