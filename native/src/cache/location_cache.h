// What a reader remembers of the directory's answers between `exists` and `fetch`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "base/zeroed_array.h"
#include "page/location.h"
#include "pool/pool.h"

namespace p2pkv {

// A set-associative cache from key to location, bounded in entries and in time; nothing is allocated after
// the constructor. Thread-safe: one mutex, taken once a batch. A stale entry costs a miss, never a wrong
// byte, because every read is validated.
class LocationCache {
 public:
  // Room for at least `capacity` entries, though a set may overflow earlier; an entry counts for `ttl`
  // seconds.
  LocationCache(size_t capacity, double ttl, int64_t (*now_ns)() = steady_now_ns);

  // Replaces what was known of a key. In a full set the entry that would expire first goes.
  void put(const Key* keys, const Location* locations, size_t n);
  // Zeros where not found.
  void get(const Key* keys, size_t n, uint8_t* found, Location* locations);
  void drop(const Key* keys, size_t n);
  // Forgets all that lies with this owner; looks at every entry.
  void drop_owner(uint64_t owner);
  // The entries that still count; looks at every entry.
  size_t size();

 private:
  static constexpr size_t kWays = 8;
  // The keys and expiries of a set are what a look-up reads; together they are three cache lines.
  struct Set {
    Key keys[kWays];
    int64_t expires_ns[kWays];  // 0: empty
  };

  size_t set_of(const Key& key) const { return hash_of(key) & mask_; }
  // The way of this key in its set, expired or not, or kWays.
  static size_t find(const Set& set, const Key& key);

  const int64_t ttl_ns_;
  int64_t (*const now_ns_)();
  std::mutex mutex_;  // guards all below
  ZeroedArray<Set> sets_;
  ZeroedArray<Location> locations_;  // kWays for each set
  size_t mask_;
};

}  // namespace p2pkv
