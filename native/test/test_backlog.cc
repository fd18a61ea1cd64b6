// What is left out of the disk's queue, and how much of it there is.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "check.h"
#include "disk/backlog.h"
#include "keys.h"

namespace {

using p2pkv::Key;
using p2pkv::disk::Backlog;
using p2pkv::test::key_of;

constexpr size_t kCapacity = 3;

std::vector<Key> keys_from(uint64_t first, size_t n) {
  std::vector<Key> keys;
  for (size_t i = 0; i < n; ++i) keys.push_back(key_of(first + i));
  return keys;
}

TEST(backlog_is_bounded_and_has_each_key_once) {
  Backlog backlog(kCapacity);
  CHECK(backlog.add(keys_from(0, 2)));
  CHECK(!backlog.add(keys_from(0, 5)));
  CHECK(backlog.take(8) == keys_from(0, kCapacity));
}

TEST(backlog_counts_what_is_being_offered) {
  Backlog backlog(kCapacity);
  backlog.add(keys_from(0, kCapacity));
  const std::vector<Key> taken = backlog.take(8);
  CHECK_EQ(backlog.size(), kCapacity);  // or whoever waits for all to be written looks too early
  backlog.settle({taken[1], taken[2]});
  CHECK_EQ(backlog.size(), 2u);
}

TEST(backlog_has_what_was_given_back_first) {
  Backlog backlog(kCapacity);
  backlog.add(keys_from(0, kCapacity));
  backlog.take(2);
  backlog.settle({key_of(1)});
  CHECK(backlog.take(8) == keys_from(1, 2));
  backlog.settle({});
  CHECK_EQ(backlog.size(), 0u);
}

}  // namespace
