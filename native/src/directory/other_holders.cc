#include "directory/other_holders.h"

#include <algorithm>
#include <bit>

#include "directory/shard.h"

namespace p2pkv {

OtherHolders::OtherHolders(size_t capacity)
    : entries_(std::bit_ceil((std::max<size_t>(capacity, 1) + kWays - 1) / kWays) * kWays),
      tags_(entries_.size()),
      mask_(entries_.size() / kWays - 1) {}

void OtherHolders::put(const Key& key, const Location* others, size_t n) {
  if (n == 0 && !may_know(key)) return;
  const std::lock_guard lock(mutex_);
  Entry* const set = set_of(key);
  Entry* entry = std::find_if(set, set + kWays,
                              [&](const Entry& known) { return known.stamp != 0 && known.key == key; });
  if (entry == set + kWays) {
    if (n == 0) return;
    // An empty one has stamp 0, so it is taken first.
    entry =
        std::min_element(set, set + kWays, [](const Entry& a, const Entry& b) { return a.stamp < b.stamp; });
  }
  entry->key = key;
  entry->stamp = n > 0 ? ++last_stamp_ : 0;  // one that knows nobody is empty
  entry->n = std::min(n, entry->others.size());
  std::copy(others, others + entry->n, entry->others.begin());
  const auto at = static_cast<size_t>(entry - &entries_[0]);
  tags_[at].store(entry->n > 0 ? tag_of(key) : 0, std::memory_order_relaxed);
}

bool OtherHolders::may_know(const Key& key) const {
  const auto first = tags_.begin() + static_cast<ptrdiff_t>(first_of(key));
  const uint16_t tag = tag_of(key);
  return std::any_of(first, first + kWays,
                     [tag](const auto& known) { return known.load(std::memory_order_relaxed) == tag; });
}

const OtherHolders::Entry* OtherHolders::find(const Key& key) {
  const Entry* const set = set_of(key);
  const Entry* const entry = std::find_if(
      set, set + kWays, [&](const Entry& known) { return known.stamp != 0 && known.key == key; });
  return entry != set + kWays ? entry : nullptr;
}

size_t OtherHolders::get(const Key& key, Others* others) {
  const std::lock_guard lock(mutex_);
  const Entry* const entry = find(key);
  if (entry == nullptr) return 0;
  *others = entry->others;
  return entry->n;
}

void OtherHolders::get(const std::vector<Key>& keys, const std::vector<size_t>& pages,
                       std::vector<uint8_t>* n_known, std::vector<Location>* others) {
  const std::lock_guard lock(mutex_);
  for (const size_t page : pages) {
    const Entry* const entry = find(keys[page]);
    n_known->push_back(entry != nullptr ? static_cast<uint8_t>(entry->n) : 0);
    if (entry == nullptr) continue;
    const auto first = entry->others.begin();
    others->insert(others->end(), first, first + static_cast<ptrdiff_t>(entry->n));
  }
}

void OtherHolders::replace_lost(Shard& shard, const Key* keys, const uint8_t* found, Location* locations,
                                uint8_t* present, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (found[i] == 0 || present[i] != 0) continue;
    Others others;
    const size_t n_others = get(keys[i], &others);
    std::array<uint8_t, kMostHolders - 1> is_present;
    is_present.fill(1);
    shard.keep_present(others.data(), is_present.data(), n_others);
    const auto first = std::find(is_present.begin(), is_present.begin() + n_others, 1) - is_present.begin();
    if (static_cast<size_t>(first) == n_others) continue;
    locations[i] = others[static_cast<size_t>(first)];
    present[i] = 1;
  }
}

}  // namespace p2pkv
