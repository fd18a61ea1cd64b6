// A page's holders beside the one that it is read from are known here.
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "directory/other_holders.h"
#include "keys.h"
#include "seed.h"

namespace {

using p2pkv::Key;
using p2pkv::Location;
using p2pkv::OtherHolders;
using p2pkv::test::key_of;

std::vector<Location> locations_of(const std::vector<uint64_t>& owners) {
  std::vector<Location> locations;
  for (const uint64_t owner : owners) locations.push_back({owner, 5, 0, 16, 64, 2, 0, 0, p2pkv::kResident});
  return locations;
}

Key random_key(std::mt19937_64& random) {
  const uint64_t words[] = {random(), random()};
  Key key;
  std::memcpy(key.bytes, words, sizeof words);
  return key;
}

TEST(other_holders_are_known_until_a_look_up_names_none) {
  OtherHolders known(1 << 8);
  const auto others = locations_of({2, 3});
  OtherHolders::Others found;
  known.put(key_of(1), others.data(), 2);
  CHECK(known.may_know(key_of(1)));
  CHECK_EQ(known.get(key_of(1), &found), 2u);
  CHECK_EQ(found[1].owner, 3u);
  known.put(key_of(1), nullptr, 0);
  CHECK(!known.may_know(key_of(1)));
  CHECK_EQ(known.get(key_of(1), &found), 0u);
}

TEST(other_holders_of_pages_that_have_none_take_no_room) {
  OtherHolders known(4);  // one set
  const auto others = locations_of({2});
  for (uint64_t name = 0; name < 4; ++name) known.put(key_of(name), others.data(), 1);
  for (uint64_t name = 4; name < 400; ++name) known.put(key_of(name), nullptr, 0);
  OtherHolders::Others found;
  for (uint64_t name = 0; name < 4; ++name) CHECK_EQ(known.get(key_of(name), &found), 1u);
  known.put(key_of(2), nullptr, 0);
  known.put(key_of(400), others.data(), 1);  // takes that place
  for (const uint64_t name : {0, 1, 3, 400}) CHECK_EQ(known.get(key_of(name), &found), 1u);
}

TEST(other_holders_of_many_pages_are_told_page_after_page) {
  OtherHolders known(1 << 8);
  std::vector<Key> keys;
  for (uint64_t name = 0; name < 6; ++name) keys.push_back(key_of(name));
  known.put(keys[1], locations_of({2, 3}).data(), 2);
  known.put(keys[3], locations_of({4}).data(), 1);
  known.put(keys[4], locations_of({5, 6, 7}).data(), 3);
  std::vector<uint8_t> n_known;
  std::vector<Location> others;
  known.get(keys, {0, 1, 4, 5}, &n_known, &others);
  CHECK(n_known == std::vector<uint8_t>({0, 2, 3, 0}));
  CHECK_EQ(others.size(), 5u);
  const uint64_t owners[] = {2, 3, 5, 6, 7};
  for (size_t i = 0; i < 5; ++i) CHECK_EQ(others[i].owner, owners[i]);
}

// Of the others the table, under its lock, need not be asked.
TEST(other_holders_are_rarely_looked_for_where_there_are_none) {
  std::mt19937_64 random(p2pkv::test::seed("other_holders"));
  OtherHolders known(1 << 12);
  const auto others = locations_of({2});
  for (int i = 0; i < 1 << 12; ++i) known.put(random_key(random), others.data(), 1);
  constexpr int kLookUps = 200'000;
  int n_taken = 0;
  for (int i = 0; i < kLookUps; ++i) n_taken += known.may_know(random_key(random)) ? 1 : 0;
  CHECK(n_taken < kLookUps / 1000);  // of four entries each has one of 32,768 tags
}

}  // namespace
