// Keys of pages that the disk's queue had no room for, until it has.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "page/location.h"

namespace p2pkv::disk {

// Thread-safe, with one thread that takes. Oldest first, each key once, and bounded: the front of a prefix
// matters most, so that the newest are left out. It says nothing of what the pages are: whoever takes a key
// out asks the pool, which may have other bytes by then, or none.
class Backlog {
 public:
  explicit Backlog(size_t capacity) : capacity_(capacity) {}

  // Whether it was empty before.
  bool add(const std::vector<Key>& keys) {
    const std::lock_guard lock(mutex_);
    const bool was_empty = keys_.empty();
    for (const Key& key : keys) {
      if (keys_.size() >= capacity_) break;
      if (known_.insert(key).second) keys_.push_back(key);
    }
    return was_empty;
  }
  // The oldest, at most `max`. They count until `settle`: nobody may take them for written meanwhile.
  std::vector<Key> take(size_t max) {
    const std::lock_guard lock(mutex_);
    const auto end = keys_.begin() + static_cast<std::ptrdiff_t>(std::min(max, keys_.size()));
    std::vector<Key> taken(keys_.begin(), end);
    keys_.erase(keys_.begin(), end);
    for (const Key& key : taken) known_.erase(key);
    n_taken_ += taken.size();
    return taken;
  }
  // Ends all takes and gives back what is left of them, as the oldest again.
  void settle(const std::vector<Key>& keys) {
    const std::lock_guard lock(mutex_);
    n_taken_ = 0;
    for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
      if (known_.insert(*key).second) keys_.push_front(*key);
    }
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    keys_.clear();
    known_.clear();
  }
  size_t size() const {
    const std::lock_guard lock(mutex_);
    return keys_.size() + n_taken_;
  }

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;  // guards all below
  std::deque<Key> keys_;
  std::unordered_set<Key, KeyHash> known_;  // the same
  size_t n_taken_ = 0;                      // not yet settled
};

}  // namespace p2pkv::disk
