// Pages that a node has stored for an engine which may not have told the other owners of entries of them yet.
//
// An engine tells them within its publish, so by its deadline. If it ends before, the node has to do it.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "page/location.h"

namespace p2pkv::attaching {

// Used by one thread.
class Untold {
 public:
  // As many as a shard takes; of more the oldest are left to the node's comparing of all its entries.
  static constexpr size_t kMost = 1 << 16;

  // Adds pages of request `id`. When `until` has passed the engine has told of them, or has given up.
  void add(uint64_t id, std::vector<Key> keys, const Deadline& until) {
    while (!publishes_.empty() && (publishes_.front().until.passed() || n_keys_ > kMost)) pop();
    n_keys_ += keys.size();
    publishes_.push_back({id, std::move(keys), until});
  }
  // Returns those of the last request if the engine has withdrawn it: it does not know that they were stored.
  std::vector<Key> take_withdrawn(uint64_t withdrawn) {
    if (publishes_.empty() || publishes_.back().id != withdrawn) return {};
    std::vector<Key> taken = std::move(publishes_.back().keys);
    n_keys_ -= taken.size();
    publishes_.pop_back();
    return taken;
  }
  // Returns those whose time is not over.
  std::vector<Key> take() {
    std::vector<Key> taken;
    for (; !publishes_.empty(); pop()) {
      const Publish& oldest = publishes_.front();
      if (!oldest.until.passed()) taken.insert(taken.end(), oldest.keys.begin(), oldest.keys.end());
    }
    return taken;
  }

 private:
  struct Publish {
    uint64_t id;
    std::vector<Key> keys;
    Deadline until;
  };

  void pop() {
    n_keys_ -= publishes_.front().keys.size();
    publishes_.pop_front();
  }

  std::deque<Publish> publishes_;
  size_t n_keys_ = 0;
};

}  // namespace p2pkv::attaching
