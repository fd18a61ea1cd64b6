#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "cache/location_cache.h"
#include "check.h"
#include "keys.h"

namespace {

using p2pkv::Key;
using p2pkv::Location;
using p2pkv::LocationCache;
using p2pkv::test::key_of;

int64_t now_ns = 0;
int64_t fake_now_ns() {
  return now_ns;
}

void put(LocationCache& cache, uint64_t name, uint64_t owner) {
  const Key key = key_of(name);
  Location location{};
  location.owner = owner;
  location.offset = name;
  cache.put(&key, &location, 1);
}

bool knows(LocationCache& cache, uint64_t name) {
  const Key key = key_of(name);
  uint8_t found = 0;
  Location location{};
  cache.get(&key, 1, &found, &location);
  if (found) CHECK_EQ(location.offset, name);
  return found != 0;
}

TEST(location_cache_forgets_after_its_time) {
  now_ns = 1;
  LocationCache cache(100, 2.0, fake_now_ns);
  put(cache, 1, 1);
  now_ns += 1'000'000'000;
  put(cache, 2, 1);
  CHECK(knows(cache, 1));
  CHECK_EQ(cache.size(), 2u);
  now_ns += 1'000'000'000;
  CHECK(!knows(cache, 1));
  CHECK(knows(cache, 2));
  CHECK_EQ(cache.size(), 1u);
  put(cache, 1, 1);
  CHECK(knows(cache, 1));
}

TEST(location_cache_replaces_and_drops) {
  now_ns = 1;
  LocationCache cache(100, 2.0, fake_now_ns);
  put(cache, 1, 1);
  put(cache, 1, 2);
  CHECK_EQ(cache.size(), 1u);
  put(cache, 2, 3);
  const Key key = key_of(1);
  cache.drop(&key, 1);
  cache.drop(&key, 1);
  CHECK(!knows(cache, 1));
  put(cache, 3, 4);
  cache.drop_owner(3);
  CHECK(!knows(cache, 2));
  CHECK(knows(cache, 3));
  CHECK_EQ(cache.size(), 1u);
}

TEST(location_cache_is_bounded_and_keeps_what_came_last) {
  now_ns = 1;
  LocationCache cache(64, 1000.0, fake_now_ns);
  for (uint64_t name = 0; name < 10000; ++name, ++now_ns) {
    put(cache, name, 1);
    CHECK(knows(cache, name));
  }
  CHECK_EQ(cache.size(), 64u);
}

TEST(location_cache_serves_threads) {
  LocationCache cache(1024, 1000.0);
  std::vector<std::thread> threads;
  for (uint64_t first = 0; first < 4; ++first) {
    threads.emplace_back([&cache, first] {
      for (uint64_t name = first; name < 3000; name += 2) {
        put(cache, name, first);
        knows(cache, name);
        if (name % 500 == 0) cache.drop_owner(first);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(cache.size() > 0);
}

}  // namespace
