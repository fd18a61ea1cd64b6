// Holders of a page for which its key had no place any more: a shard keeps few of them a key.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "page/location.h"

namespace p2pkv {

// Once one of those who have a place gives it up, a spare holder is *called*: it is told, and puts its entry
// again. Without that the page would be found nowhere when all who had a place have evicted it, until the
// spare one looks at all its entries.
//
// A stripe of a shard has one, guarded by the stripe's lock.
class SpareHolders {
 public:
  struct Called {
    Key key;
    uint64_t owner;
  };

  // A key has as many of them as it has places, since all who have one may go at once.
  static constexpr size_t kMostOfAKey = 8;
  // Beyond these bounds spare holders are forgotten, and calls are not made.
  static constexpr size_t kMostKeys = 1 << 10;
  static constexpr size_t kMostCalled = 1 << 10;

  // The first to come stay.
  void add(const Key& key, uint64_t owner) {
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) {
      if (by_key_.size() < kMostKeys) by_key_.emplace(key, std::vector<uint64_t>{owner});
    } else if (found->second.size() < kMostOfAKey &&
               std::find(found->second.begin(), found->second.end(), owner) == found->second.end()) {
      found->second.push_back(owner);
    }
  }

  // It has a place now, or the page no more.
  void remove(const Key& key, uint64_t owner) {
    if (by_key_.empty()) return;
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return;
    std::erase(found->second, owner);
    if (found->second.empty()) by_key_.erase(found);
  }

  // A place is free: calls the first of which `is_there`, and forgets those before it.
  template <typename IsThere>
  void call(const Key& key, IsThere is_there) {
    if (by_key_.empty()) return;
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return;
    std::vector<uint64_t>& spare = found->second;
    const auto next = std::find_if(spare.begin(), spare.end(), is_there);
    if (next != spare.end() && called_.size() < kMostCalled) called_.push_back({key, *next});
    spare.erase(spare.begin(), next == spare.end() ? next : next + 1);
    if (spare.empty()) by_key_.erase(found);
  }

  // Others answer for this key now.
  void remove(const Key& key) {
    if (!by_key_.empty()) by_key_.erase(key);
  }

  // Appends calls to `taken` until these are `limit`.
  void take_called(size_t limit, std::vector<Called>* taken) {
    const size_t n = std::min(limit - std::min(limit, taken->size()), called_.size());
    const auto first = called_.end() - static_cast<ptrdiff_t>(n);
    taken->insert(taken->end(), first, called_.end());
    called_.erase(first, called_.end());
  }

 private:
  std::unordered_map<Key, std::vector<uint64_t>, KeyHash> by_key_;
  std::vector<Called> called_;
};

}  // namespace p2pkv
