#include "directory/other_holders.h"

#include <algorithm>
#include <bit>

namespace p2pkv {

OtherHolders::OtherHolders(size_t capacity)
    : entries_(std::bit_ceil((std::max<size_t>(capacity, 1) + kWays - 1) / kWays) * kWays),
      mask_(entries_.size() / kWays - 1) {}

void OtherHolders::put(const Key& key, const Location* others, size_t n) {
  const std::lock_guard lock(mutex_);
  Entry* const set = set_of(key);
  Entry* entry = std::find_if(set, set + kWays,
                              [&](const Entry& known) { return known.stamp != 0 && known.key == key; });
  if (entry == set + kWays) {
    // An empty one has stamp 0, so it is taken first.
    entry =
        std::min_element(set, set + kWays, [](const Entry& a, const Entry& b) { return a.stamp < b.stamp; });
  }
  entry->key = key;
  entry->stamp = ++last_stamp_;
  entry->n = std::min(n, entry->others.size());
  std::copy(others, others + entry->n, entry->others.begin());
}

size_t OtherHolders::get(const Key& key, Others* others) {
  const std::lock_guard lock(mutex_);
  const Entry* const set = set_of(key);
  const Entry* const entry = std::find_if(
      set, set + kWays, [&](const Entry& known) { return known.stamp != 0 && known.key == key; });
  if (entry == set + kWays) return 0;
  *others = entry->others;
  return entry->n;
}

}  // namespace p2pkv
