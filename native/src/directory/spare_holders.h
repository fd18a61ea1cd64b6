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
// spare one looks at all its entries. It stays a spare one until it has a place: another may be faster, and
// then it is told that all is well, and puts nothing. No call is made but for a place that is given up.
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

  // The first to come stay, but for those that have been called.
  void add(const Key& key, uint64_t owner) {
    if (by_key_.size() >= kMostKeys && by_key_.count(key) == 0) return;
    std::vector<Spare>& spare = by_key_[key];
    const auto known = find(spare, owner);
    if (known != spare.end()) {
      known->is_called = false;
      return;
    }
    if (spare.size() >= kMostOfAKey) {
      const auto called =
          std::find_if(spare.begin(), spare.end(), [](const Spare& one) { return one.is_called; });
      if (called == spare.end()) return;
      spare.erase(called);
    }
    spare.push_back({owner, false});
  }

  // It has a place now, or the page no more.
  void remove(const Key& key, uint64_t owner) {
    if (by_key_.empty()) return;
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return;
    const auto known = find(found->second, owner);
    if (known != found->second.end()) found->second.erase(known);
    if (found->second.empty()) by_key_.erase(found);
  }

  // A place is free: calls the first that has not been called, else the one whose call is the oldest, and
  // forgets those that are not there.
  template <typename IsThere>
  void call(const Key& key, IsThere is_there) {
    if (by_key_.empty()) return;
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return;
    std::vector<Spare>& spare = found->second;
    std::erase_if(spare, [&](const Spare& one) { return !is_there(one.owner); });
    if (spare.empty()) {
      by_key_.erase(found);
    } else if (called_.size() < kMostCalled) {
      auto next = std::find_if(spare.begin(), spare.end(), [](const Spare& one) { return !one.is_called; });
      if (next == spare.end()) next = spare.begin();
      called_.push_back({key, next->owner});
      next->is_called = true;
      std::rotate(next, next + 1, spare.end());
    }
  }

  // Others answer for this key now.
  void remove(const Key& key) {
    if (!by_key_.empty()) by_key_.erase(key);
  }

  // Forgets those of keys of which nobody has had a place for a while: who was called has not come.
  template <typename IsForgotten>
  void remove_if(IsForgotten is_forgotten) {
    std::erase_if(by_key_, [&](const auto& one) { return is_forgotten(one.first); });
  }

  // Appends calls to `taken` until these are `limit`.
  void take_called(size_t limit, std::vector<Called>* taken) {
    const size_t n = std::min(limit - std::min(limit, taken->size()), called_.size());
    const auto first = called_.end() - static_cast<ptrdiff_t>(n);
    taken->insert(taken->end(), first, called_.end());
    called_.erase(first, called_.end());
  }

 private:
  // Called ones come last, the one whose call is the oldest first.
  struct Spare {
    uint64_t owner;
    bool is_called;
  };

  static std::vector<Spare>::iterator find(std::vector<Spare>& spare, uint64_t owner) {
    return std::find_if(spare.begin(), spare.end(), [owner](const Spare& one) { return one.owner == owner; });
  }

  std::unordered_map<Key, std::vector<Spare>, KeyHash> by_key_;
  std::vector<Called> called_;
};

}  // namespace p2pkv
