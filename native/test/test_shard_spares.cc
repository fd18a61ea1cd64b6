// Holders of a page beyond those that the directory has room for: they are known, and called when there is
// room.
#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "directory/shard.h"
#include "shard_calls.h"

namespace {

using namespace p2pkv::test::shards;
using p2pkv::Shard;
using p2pkv::wire::PutEntry;

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

}  // namespace
