#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "directory/ring_table.h"
#include "directory/shard.h"
#include "keys.h"
#include "seed.h"

namespace {

using p2pkv::Key;
using p2pkv::Location;
using p2pkv::RingTable;
using p2pkv::Shard;
using p2pkv::wire::DropEntry;
using p2pkv::wire::PutEntry;

constexpr uint64_t kBoot = 5;

// Spread over stripes as BLAKE2b would.
Key key_of(uint64_t name) {
  Key key = p2pkv::test::key_of(name);
  key.bytes[15] = static_cast<uint8_t>(name);
  return key;
}

// Every field follows from the others, so that a reader can tell a torn location from a whole one.
Location location_of(uint64_t name, uint64_t owner, uint64_t generation, uint64_t boot = kBoot) {
  return {owner,           boot, name, owner ^ name, generation ^ name, generation, generation * 31 + name, 0,
          p2pkv::kResident};
}

bool is_whole(const Location& at, uint64_t name) {
  const Location expected = location_of(name, at.owner, at.generation, at.boot);
  return std::memcmp(&at, &expected, sizeof at) == 0;
}

void put(Shard& shard, uint64_t name, uint64_t owner, uint64_t sequence, uint32_t now,
         uint64_t boot = kBoot) {
  const PutEntry entry{key_of(name), sequence, location_of(name, owner, sequence * 2, boot)};
  shard.put(&entry, 1, now);
}

void drop(Shard& shard, uint64_t name, uint64_t owner, uint64_t sequence, uint64_t generation, uint32_t now) {
  const DropEntry entry{key_of(name), sequence, owner, kBoot, generation};
  shard.drop(&entry, 1, now);
}

// The generation found under `name`, 0 for none.
uint64_t get(Shard& shard, uint64_t name) {
  const Key key = key_of(name);
  uint8_t found = 0;
  Location at{};
  shard.get(&key, 1, &found, &at);
  if (found == 0) return 0;
  CHECK(is_whole(at, name));
  return at.generation;
}

void set_view(Shard& shard, const std::vector<uint64_t>& owners) {
  const std::vector<uint64_t> boots(owners.size(), kBoot);
  shard.set_view(owners.data(), boots.data(), owners.size());
}

void confirm(Shard& shard, uint32_t first, uint32_t last) {
  for (uint32_t now = first; now <= last; ++now) shard.confirm_view(now);
}

void sweep_all(Shard& shard, uint32_t now) {
  for (size_t i = 0; i < Shard::kStripes; ++i) shard.sweep(now);
}

TEST(shard_forgets_tombstones_after_their_time_and_not_before) {
  Shard shard(1 << 12);
  set_view(shard, {1});
  put(shard, 7, 1, 3, 100);
  drop(shard, 7, 1, 4, 6, 100);
  sweep_all(shard, 130);
  put(shard, 7, 1, 3, 130);  // a late retry
  CHECK_EQ(get(shard, 7), 0u);
  CHECK_EQ(shard.stats().tombstones, 1u);
  sweep_all(shard, 131);
  CHECK_EQ(shard.stats().tombstones, 0u);
  put(shard, 7, 1, 5, 131);
  CHECK_EQ(get(shard, 7), 10u);
}

TEST(shard_keeps_what_is_stamped_after_the_sweep_began) {
  // A sweep takes its time first and the stripe's lock later: in between another thread stores something
  // newer.
  Shard shard(1 << 12);
  set_view(shard, {1});
  put(shard, 7, 1, 3, 101);
  drop(shard, 7, 1, 4, 6, 101);
  put(shard, 8, 2, 1, 101);
  sweep_all(shard, 100);
  put(shard, 7, 1, 3, 101);
  CHECK_EQ(get(shard, 7), 0u);
  set_view(shard, {1, 2});
  CHECK_EQ(get(shard, 8), 2u);
}

TEST(shard_drops_entries_of_owners_that_stay_outside_the_view) {
  Shard shard(1 << 12);
  set_view(shard, {1});
  for (uint64_t name = 0; name < 1000; ++name) put(shard, name, 1 + name % 2, 1, 100);
  confirm(shard, 90, 111);
  sweep_all(shard, 110);
  CHECK_EQ(shard.stats().entries, 1000u);
  sweep_all(shard, 111);
  CHECK_EQ(shard.stats().entries, 500u);
  for (uint64_t name = 0; name < 1000; ++name) CHECK_EQ(get(shard, name), name % 2 == 0 ? 2u : 0u);
}

// One of two members owns all keys; the shard's node is the first.
std::vector<std::shared_ptr<const RingTable>> owned_by(int32_t member) {
  const std::vector<uint64_t> points{1};
  return {std::make_shared<const RingTable>(points, std::vector<int32_t>{member}, 1,
                                            std::vector<uint8_t>{1, 1}, 0)};
}

TEST(shard_finds_no_leftovers) {
  Shard shard(1 << 12);
  shard.set_time(100);
  set_view(shard, {1, 2});
  put(shard, 7, 1, 1, 100);
  shard.set_rings(owned_by(1));
  confirm(shard, 90, 103);
  shard.set_time(103);
  CHECK_EQ(get(shard, 7), 2u);  // who has put it may know a ring that is not known here yet
  shard.set_time(104);
  confirm(shard, 104, 104);
  CHECK_EQ(get(shard, 7), 0u);
  shard.set_time(107);
  CHECK_EQ(get(shard, 7), 2u);  // nobody says any more that the rings are those of the moment
  confirm(shard, 107, 107);
  CHECK_EQ(get(shard, 7), 0u);
  CHECK_EQ(shard.stats().entries, 1u);
  shard.set_rings(owned_by(0));  // its key comes back; what became of it others were told
  CHECK_EQ(get(shard, 7), 0u);
  CHECK_EQ(shard.stats().entries, 0u);
}

TEST(shard_finds_what_is_its_own_by_one_of_its_rings) {
  Shard shard(1 << 12);
  set_view(shard, {1, 2});
  put(shard, 7, 1, 1, 100);
  auto rings = owned_by(1);
  rings.push_back(owned_by(0).front());
  shard.set_rings(rings);
  confirm(shard, 90, 120);
  shard.set_time(120);
  CHECK_EQ(get(shard, 7), 2u);
  sweep_all(shard, 120);
  CHECK_EQ(shard.stats().entries, 1u);
}

TEST(shard_sweeps_leftovers_out_that_come_late_too) {
  Shard shard(1 << 12);
  set_view(shard, {1, 2});
  for (uint64_t name = 0; name < 1000; ++name) put(shard, name, 1, 1, 100);
  shard.set_rings(owned_by(1));
  confirm(shard, 90, 104);
  for (int round = 0; round < 2; ++round) sweep_all(shard, 104);
  CHECK_EQ(shard.stats().entries, 0u);
  put(shard, 7, 1, 2, 104);  // by somebody who sees another ring
  confirm(shard, 105, 108);
  shard.set_time(108);
  CHECK_EQ(get(shard, 7), 0u);
  sweep_all(shard, 108);
  CHECK_EQ(shard.stats().entries, 0u);
}

TEST(shard_keeps_whom_a_view_that_nobody_confirms_does_not_know) {
  Shard shard(1 << 12);
  set_view(shard, {1});
  put(shard, 7, 2, 1, 100);
  sweep_all(shard, 200);  // never confirmed
  confirm(shard, 90, 100);
  sweep_all(shard, 120);  // not for 20 s, as when the interpreter is held
  confirm(shard, 120, 125);
  sweep_all(shard, 125);  // who came meanwhile may not have been heard of yet
  set_view(shard, {1, 2});
  CHECK_EQ(get(shard, 7), 2u);
  set_view(shard, {1});
  confirm(shard, 126, 131);
  sweep_all(shard, 131);
  CHECK_EQ(shard.stats().entries, 0u);
}

TEST(shard_forgets_living_owners_of_a_hot_key_last) {
  Shard shard(1 << 12);
  std::vector<uint64_t> owners{1};
  for (uint64_t owner = 20; owner < 40; ++owner) owners.push_back(owner);
  set_view(shard, owners);
  put(shard, 7, 1, 1, 100);
  put(shard, 7, 2, 1, 101);  // not in the view
  for (uint64_t owner = 20; owner < 26; ++owner) put(shard, 7, owner, 1, 102);
  put(shard, 7, 26, 1, 103);  // one too many: 2 goes
  for (uint64_t owner = 20; owner < 26; ++owner) drop(shard, 7, owner, 2, 2, 104);
  CHECK_EQ(shard.stats().entries, 2u);
  for (uint64_t owner = 27; owner < 33; ++owner) {  // the oldest tombstones go
    put(shard, 7, owner, 1, 105);
    drop(shard, 7, owner, 2, 2, 105);
  }
  drop(shard, 7, 26, 2, 2, 106);
  CHECK_EQ(get(shard, 7), 2u);  // the first of all still has it
  CHECK_EQ(shard.stats().entries, 1u);
}

TEST(shard_names_several_holders_those_with_the_page_in_memory_first) {
  Shard shard(1 << 10);
  set_view(shard, {1, 2, 3, 4, 5, 6});
  for (const uint64_t owner : {1, 2, 3, 4, 5, 6, 7}) {
    PutEntry entry{key_of(8), 1, location_of(8, owner, 2)};
    if (owner <= 2) entry.location.flags = p2pkv::kHasDisk;
    shard.put(&entry, 1, 10);
  }
  put(shard, 9, 3, 1, 10);
  const std::vector<Key> keys{key_of(8), key_of(10), key_of(9)};
  for (const size_t most : {1, 2, 4, 100}) {
    std::vector<uint8_t> n_named(keys.size());
    std::vector<Location> locations;
    shard.get_holders(keys.data(), keys.size(), most, n_named.data(), &locations);
    const size_t n = std::min<size_t>(most, p2pkv::kMostHolders);
    CHECK_EQ(n_named[0], n);
    CHECK_EQ(n_named[1], 0);
    CHECK_EQ(n_named[2], 1);
    CHECK_EQ(locations.size(), n + 1);
    std::set<uint64_t> owners;
    for (size_t i = 0; i < n; ++i) {
      CHECK(locations[i].flags == p2pkv::kResident);
      CHECK(locations[i].owner <= 6);
      owners.insert(locations[i].owner);
    }
    CHECK_EQ(owners.size(), n);
    CHECK_EQ(locations.back().owner, 3u);
  }
}

TEST(shard_names_the_first_holder_first_and_of_the_rest_others_in_each_question) {
  constexpr uint64_t kHolders = 6;
  Shard shard(1 << 12);
  set_view(shard, {1, 2, 3, 4, 5, 6});
  std::mt19937_64 random(p2pkv::test::seed("shard_names"));
  std::vector<Key> keys;
  std::vector<uint64_t> firsts;
  for (uint64_t name = 0; name < 64; ++name) {
    std::vector<uint64_t> owners{1, 2, 3, 4, 5, 6};
    std::shuffle(owners.begin(), owners.end(), random);
    for (const uint64_t owner : owners) put(shard, name, owner, 1, 10);
    keys.push_back(key_of(name));
    firsts.push_back(owners[0]);
  }
  constexpr int kQuestions = 400;
  std::map<uint64_t, int> n_named_with;
  for (int i = 0; i < kQuestions; ++i) {
    std::vector<uint8_t> n_named(keys.size());
    std::vector<Location> locations;
    shard.get_holders(keys.data(), keys.size(), 4, n_named.data(), &locations);
    CHECK_EQ(locations.size(), 4 * keys.size());
    std::set<uint64_t> rest;
    for (size_t key = 0; key < keys.size(); ++key) {
      CHECK_EQ(locations[4 * key].owner, firsts[key]);  // the page's owner, and not its guests
      std::set<uint64_t> named;
      for (size_t j = 0; j < 4; ++j) named.insert(locations[4 * key + j].owner);
      CHECK_EQ(named.size(), 4u);
      named.erase(firsts[key]);
      rest.insert(named.begin(), named.end());
    }
    CHECK(rest.size() <= 4);  // the same three of all keys, but for who is first already
    for (const uint64_t owner : rest) ++n_named_with[owner];
    std::vector<Location> alone;
    shard.get_holders(keys.data(), keys.size(), 1, n_named.data(), &alone);
    for (size_t key = 0; key < keys.size(); ++key) CHECK_EQ(alone[key].owner, firsts[key]);
  }
  for (uint64_t owner = 1; owner <= kHolders; ++owner) {
    CHECK(n_named_with[owner] > kQuestions / 3);  // two thirds of them, if all draws are fair
    CHECK(n_named_with[owner] < kQuestions);
  }
}

TEST(shard_says_which_entries_it_has) {
  Shard shard(1 << 12);
  set_view(shard, {1, 2, 3, 4, 5, 6, 7, 8, 9});
  const auto keeps = [&shard](uint64_t name, uint64_t owner, uint64_t generation) {
    const p2pkv::wire::CheckEntry entry{key_of(name),
                                        p2pkv::mark_of(location_of(name, owner, generation, kBoot))};
    uint8_t kept = 2;
    shard.check(&entry, 1, &kept);
    return kept == 1;
  };
  put(shard, 7, 1, 2, 100);
  CHECK(keeps(7, 1, 4));
  CHECK(!keeps(7, 1, 6));  // another page of this key
  CHECK(!keeps(7, 2, 4));
  CHECK(!keeps(8, 1, 4));
  drop(shard, 7, 1, 3, 4, 100);
  CHECK(!keeps(7, 1, 4));
  for (uint64_t owner = 1; owner <= 8; ++owner) put(shard, 7, owner, 4, 101);
  CHECK(keeps(7, 9, 8));  // there is no room for a ninth
}

// Names the holders that count.
std::set<uint64_t> holders_of(Shard& shard, uint64_t name) {
  std::set<uint64_t> holders;
  for (const auto& known : shard.entries_of(key_of(name), 200)) {
    if (known.is_counting) holders.insert(known.location.owner);
  }
  return holders;
}

std::vector<uint64_t> called(Shard& shard) {
  std::vector<uint64_t> owners;
  for (const auto& [key, owner] : shard.take_called(100)) owners.push_back(owner);
  return owners;
}

TEST(shard_keeps_the_first_eight_holders_and_calls_others_when_there_is_room) {
  Shard shard(1 << 12);
  set_view(shard, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  for (uint64_t owner = 1; owner <= 10; ++owner) {
    put(shard, 7, owner, 4, static_cast<uint32_t>(100 + owner));
    put(shard, 7, owner, 4, static_cast<uint32_t>(100 + owner));
  }
  CHECK(holders_of(shard, 7) == (std::set<uint64_t>{1, 2, 3, 4, 5, 6, 7, 8}));
  CHECK(called(shard).empty());
  drop(shard, 7, 3, 5, 8, 120);
  CHECK(called(shard) == (std::vector<uint64_t>{9}));
  put(shard, 7, 9, 4, 121);
  put(shard, 7, 9, 4, 121);
  CHECK(holders_of(shard, 7) == (std::set<uint64_t>{1, 2, 4, 5, 6, 7, 8, 9}));
  drop(shard, 7, 10, 5, 8, 122);  // this one has let it go without ever having had a place
  drop(shard, 7, 1, 5, 8, 123);
  CHECK(called(shard).empty());
}

TEST(shard_has_one_entry_of_an_owner_that_comes_back_to_a_page_that_eight_have) {
  Shard shard(1 << 12);
  set_view(shard, {1, 2, 3, 4, 5, 6, 7, 8, 9});
  for (uint64_t owner = 1; owner <= 8; ++owner) put(shard, 7, owner, 4, 100);
  drop(shard, 7, 1, 5, 8, 101);
  put(shard, 7, 9, 4, 102);
  put(shard, 7, 1, 6, 103);  // there is no place for it
  CHECK(holders_of(shard, 7) == (std::set<uint64_t>{2, 3, 4, 5, 6, 7, 8, 9}));
  PutEntry on_disk{key_of(7), 5, location_of(7, 4, 10)};
  on_disk.location.flags = 0;
  shard.put(&on_disk, 1, 104);
  put(shard, 7, 1, 8, 105);  // there is now, and its tombstone has gone
  CHECK(holders_of(shard, 7) == (std::set<uint64_t>{1, 2, 3, 5, 6, 7, 8, 9}));
  CHECK_EQ(shard.entries_of(key_of(7), 106).size(), 8U);
  CHECK_EQ(shard.stats().entries, 8U);
  CHECK_EQ(shard.stats().tombstones, 0U);
  drop(shard, 7, 9, 5, 8, 107);
  CHECK(called(shard) == (std::vector<uint64_t>{4}));
}

TEST(shard_calls_a_holder_again_that_was_called_in_vain) {
  Shard shard(1 << 12);
  set_view(shard, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  for (uint64_t owner = 1; owner <= 9; ++owner) put(shard, 7, owner, 4, 100);
  drop(shard, 7, 1, 5, 8, 101);
  CHECK(called(shard) == (std::vector<uint64_t>{9}));
  put(shard, 7, 10, 4, 102);  // another has the place
  for (uint32_t time = 103; time < 150; time += 3) {
    sweep_all(shard, time);
    CHECK(called(shard).empty());
  }
  drop(shard, 7, 2, 5, 8, 150);
  CHECK(called(shard) == (std::vector<uint64_t>{9}));
  put(shard, 7, 9, 4, 151);
  drop(shard, 7, 3, 5, 8, 152);
  CHECK(called(shard).empty());
}

TEST(shard_forgets_who_was_called_and_did_not_come_with_the_last_tombstone_of_the_key) {
  Shard shard(1 << 12);
  set_view(shard, {1, 2, 3, 4, 5, 6, 7, 8, 9});
  const auto let_go = [&shard](uint64_t sequence, uint32_t time) {
    for (uint64_t owner = 1; owner <= 8; ++owner) drop(shard, 7, owner, sequence, 2 * sequence - 2, time);
    return called(shard).size();
  };
  for (uint64_t owner = 1; owner <= 9; ++owner) put(shard, 7, owner, 4, 100);
  CHECK_EQ(let_go(5, 101), 8u);  // one call for each place
  sweep_all(shard, 120);
  for (uint64_t owner = 1; owner <= 8; ++owner) put(shard, 7, owner, 6, 121);
  CHECK_EQ(let_go(7, 122), 8u);
  sweep_all(shard, 200);
  sweep_all(shard, 200);
  for (uint64_t owner = 1; owner <= 8; ++owner) put(shard, 7, owner, 8, 201);
  CHECK_EQ(let_go(9, 202), 0u);
}

TEST(shard_names_spare_holders_of_many_keys_a_batch_at_a_time) {
  Shard shard(1 << 16);
  set_view(shard, {1, 2, 3, 4, 5, 6, 7, 8, 9});
  constexpr uint64_t kKeys = 300;
  for (uint64_t name = 0; name < kKeys; ++name) {
    for (uint64_t owner = 1; owner <= 9; ++owner) put(shard, name, owner, 4, 100);
    drop(shard, name, 1, 5, 8, 101);
  }
  std::set<std::array<uint8_t, 16>> keys;
  size_t n_batches = 0;
  for (size_t n = 1; n > 0; ++n_batches) {
    const auto taken = shard.take_called(64);
    n = taken.size();
    CHECK(n <= 64);
    for (const auto& [key, owner] : taken) {
      std::array<uint8_t, 16> bytes;
      std::copy_n(key.bytes, bytes.size(), bytes.begin());
      keys.insert(bytes);
      CHECK_EQ(owner, 9u);
    }
  }
  CHECK_EQ(keys.size(), kKeys);
  CHECK_EQ(n_batches, kKeys / 64 + 2);
}

TEST(shard_stays_right_while_threads_put_and_drop_keys_with_spare_holders) {
  Shard shard(1 << 16);
  set_view(shard, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  constexpr uint64_t kKeys = 64, kThreads = 4;
  std::vector<std::thread> threads;
  for (uint64_t index = 0; index < kThreads; ++index) {
    threads.emplace_back([&shard, index] {
      for (uint64_t name = index; name < kKeys; name += kThreads) {
        for (uint64_t seq = 4; seq < 44; seq += 2) {
          for (uint64_t owner = 1; owner <= 10; ++owner) put(shard, name, owner, seq, 100);
          for (uint64_t owner = 1; owner <= 8; ++owner) drop(shard, name, owner, seq + 1, 2 * seq, 100);
        }
        for (const uint64_t owner : {9, 10}) put(shard, name, owner, 44, 100);
      }
    });
  }
  const auto take = [&shard] { return shard.take_called(1000).size(); };
  size_t n_called = 0;
  for (int i = 0; i < 200; ++i) n_called += take();
  for (auto& thread : threads) thread.join();
  for (size_t n = 1; n > 0; n_called += n) n = take();
  CHECK(n_called >= kKeys);
  CHECK_EQ(shard.stats().entries, 2 * kKeys);
}

TEST(shard_calls_a_spare_holder_when_another_has_left_the_cluster) {
  Shard shard(1 << 12);
  set_view(shard, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  for (const uint64_t owner : {1, 2, 3, 4, 5, 6, 7, 8, 10, 9}) put(shard, 7, owner, 4, 100);
  set_view(shard, {2, 3, 4, 5, 6, 7, 8, 9});  // the first spare one has gone as well
  confirm(shard, 100, 120);
  sweep_all(shard, 120);
  CHECK(called(shard) == (std::vector<uint64_t>{9}));
}

TEST(shard_has_who_has_a_page_in_its_pool_in_the_place_of_one_on_disk) {
  Shard shard(1 << 12);
  set_view(shard, {1, 2, 3, 4, 5, 6, 7, 8, 9});
  for (uint64_t owner = 1; owner <= 8; ++owner) put(shard, 7, owner, 4, 100);
  PutEntry on_disk{key_of(7), 5, location_of(7, 4, 10)};
  on_disk.location.flags = 0;
  shard.put(&on_disk, 1, 101);
  put(shard, 7, 9, 4, 102);
  CHECK(holders_of(shard, 7) == (std::set<uint64_t>{1, 2, 3, 5, 6, 7, 8, 9}));
  drop(shard, 7, 9, 5, 8, 103);
  CHECK(called(shard) == (std::vector<uint64_t>{4}));
}

TEST(shard_remembers_what_others_find_stale_of_its_own_node) {
  Shard shard(1 << 12);
  set_view(shard, {1, 2});
  shard.watch(1);
  for (uint64_t name = 0; name < 10; ++name) put(shard, name, 1 + name % 2, 1, 100);
  for (uint64_t name = 0; name < 10; ++name) drop(shard, name, 1 + name % 2, 0, 2, 100);
  drop(shard, 4, 1, 0, 2, 100);
  drop(shard, 20, 1, 7, 2, 100);  // its own word
  CHECK_EQ(shard.take_doubted(3).size(), 3u);
  CHECK_EQ(shard.take_doubted(100).size(), 2u);
  CHECK_EQ(shard.take_doubted(100).size(), 0u);
}

TEST(shard_agrees_with_a_map_whatever_the_order) {
  std::mt19937_64 random(p2pkv::test::seed("shard_agrees_with_a_map"));
  Shard shard(1 << 16);
  set_view(shard, {1, 2, 3});
  std::map<std::pair<uint64_t, uint64_t>, uint64_t> model;  // name, owner -> generation
  uint32_t now = 0;
  for (uint64_t sequence = 1; sequence < 40'000; ++sequence) {
    // Few names a stripe, so that erasing moves entries about all the time.
    const uint64_t name = random() % 600;
    const uint64_t owner = 1 + random() % 3;
    switch (random() % 4) {
      case 0:
      case 1:
        put(shard, name, owner, sequence, now);
        model[{name, owner}] = sequence * 2;
        break;
      case 2: {
        const auto entry = model.find({name, owner});
        if (entry == model.end()) break;
        drop(shard, name, owner, sequence, entry->second, now);
        model.erase(entry);
        break;
      }
      default:
        if (random() % 16 == 0) sweep_all(shard, now += 40);
    }
    if (sequence % 100 != 0) continue;
    const uint64_t asked = random() % 600;
    bool is_known = false;
    uint64_t found = get(shard, asked);
    for (uint64_t each = 1; each <= 3; ++each) {
      const auto entry = model.find({asked, each});
      is_known |= entry != model.end() && entry->second == found;
    }
    CHECK(found == 0 ? model.lower_bound({asked, 0}) == model.lower_bound({asked + 1, 0}) : is_known);
  }
  CHECK_EQ(shard.stats().entries, model.size());
}

TEST(shard_serves_threads_whole_locations) {
  Shard shard(1 << 14);
  set_view(shard, {1, 2, 3, 4});
  constexpr uint64_t kNames = 512;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (uint64_t owner = 1; owner <= 2; ++owner) {
    threads.emplace_back([&, owner] {
      for (uint64_t sequence = 1; sequence < 12'000; ++sequence) {
        const uint64_t name = sequence * 7 % kNames;
        put(shard, name, owner, sequence, static_cast<uint32_t>(sequence / 100));
        if (sequence % 3 == 0)
          drop(shard, name, owner, sequence, sequence * 2, static_cast<uint32_t>(sequence / 100));
      }
      stop = true;
    });
  }
  threads.emplace_back([&] {
    for (uint64_t name = 0; !stop; name = (name + 1) % kNames) get(shard, name);
  });
  threads.emplace_back([&] {
    for (uint32_t now = 0; !stop; ++now) {
      shard.sweep(now);
      set_view(shard, now % 2 == 0 ? std::vector<uint64_t>{1} : std::vector<uint64_t>{1, 2});
      shard.stats();
    }
  });
  for (std::thread& thread : threads) thread.join();
  CHECK(shard.stats().entries <= 2 * kNames);
}

}  // namespace
