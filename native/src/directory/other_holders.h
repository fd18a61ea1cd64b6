// Where else pages lie: the holders that shards name beside the first one of a key, for a read that fails or
// is late to go on with.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/zeroed_array.h"
#include "page/location.h"

namespace p2pkv {

class Shard;

// How many holders of a key a shard names at most: one to read from, and enough others to lose some.
constexpr size_t kMostHolders = 4;

// Bounded in keys; a key that is not known any more costs a second look-up. Thread-safe: one mutex, which a
// call takes for those of its pages only that others hold too. Stale holders cost a read in vain, never a
// wrong byte: reads are validated.
class OtherHolders {
 public:
  using Others = std::array<Location, kMostHolders - 1>;

  // Room for at least `capacity` keys, though a set may overflow earlier. Memory is touched as it is needed.
  explicit OtherHolders(size_t capacity);

  // Replaces what was known of a key; takes the first kMostHolders - 1 of `others`. Where there are none and
  // none were known, which is the rule, it takes no lock.
  void put(const Key& key, const Location* others, size_t n);
  // Whether others of a key are known, without the mutex: true for one key in some thousands of which none
  // are.
  bool may_know(const Key& key) const;
  // Returns how many others of a key are known, and copies them.
  size_t get(const Key& key, Others* others);
  // Does the same for many pages, numbers of `keys`, with one lock: it appends for each how many are known to
  // `n_known`, and these to `others`.
  void get(const std::vector<Key>& keys, const std::vector<size_t>& pages, std::vector<uint8_t>* n_known,
           std::vector<Location>* others);
  // Names another holder of each key that was `found` and whose location is of a node that is not `present`
  // any more, if one is known that is, and has the key count as present.
  void replace_lost(Shard& shard, const Key* keys, const uint8_t* found, Location* locations,
                    uint8_t* present, size_t n);

 private:
  static constexpr size_t kWays = 4;
  struct Entry {
    Key key;
    uint64_t stamp;  // of the last put; 0: empty
    uint64_t n;
    Others others;
  };

  size_t first_of(const Key& key) const { return (hash_of(key) & mask_) * kWays; }
  Entry* set_of(const Key& key) { return &entries_[first_of(key)]; }
  // Bits of the key that choose no set, and never 0, which stands for an entry without others.
  static uint16_t tag_of(const Key& key) {
    return static_cast<uint16_t>(key.bytes[14] << 8 | key.bytes[15] | 1);
  }
  const Entry* find(const Key& key);  // with the lock

  std::mutex mutex_;  // guards the entries and the stamp, and who writes tags
  ZeroedArray<Entry> entries_;
  std::vector<std::atomic<uint16_t>> tags_;  // one an entry
  const size_t mask_;
  uint64_t last_stamp_ = 0;
};

}  // namespace p2pkv
