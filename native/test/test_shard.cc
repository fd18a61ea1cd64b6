#include <algorithm>
#include <atomic>
#include <cstdint>
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
#include "seed.h"
#include "shard_calls.h"

namespace {

using namespace p2pkv::test::shards;
using p2pkv::Key;
using p2pkv::Location;
using p2pkv::RingTable;
using p2pkv::Shard;
using p2pkv::wire::PutEntry;

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
