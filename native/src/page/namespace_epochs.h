// Epochs of namespaces: what a bump raises, so that pages published before it are found no more.
//
// A page's key is hashed with the epoch of its namespace (p2pkv/page.py), so two nodes that know the same
// epochs find each other's pages, and nobody who knows of a bump finds pages of before. Epochs only grow, and
// two tables merge by the greater epoch of each namespace, in whatever order and however often.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "page/location.h"
#include "page/vigil.h"

namespace p2pkv {

// As on the wire. The namespace by the digest of its name; zeros: every namespace.
struct NamespaceEpoch {
  Key name_space;
  uint64_t epoch;
};
static_assert(sizeof(NamespaceEpoch) == 24);

// Thread-safe.
class NamespaceEpochs {
 public:
  // Beyond it the lowest is made one of every namespace, which costs others misses and forgets nothing.
  static constexpr size_t kMost = 1024;
  // An epoch is below it, and there is room above for those to come.
  static constexpr uint64_t kEnd = uint64_t{1} << 62;

  // Says what this node's own pages are of: their namespace, and those that it is a part of. It is called
  // before anything is raised.
  void follow(std::vector<Key> names);
  // Has `raise` call this when `own` has grown: it takes back this node's pages. Null ends that.
  void on_raised(std::function<void()> take_back);
  // Has `version` stand in this word of shared memory too, from now on: who looks there needs not ask. Null
  // ends that; the word is not written to any more when this returns.
  void show_version(uint64_t* word);

  // Has all that are known told to `keep`, now and before any `raise` returns. It may not call back. Null
  // ends that.
  void keep(std::function<void(const std::vector<NamespaceEpoch>&)> keep);

  // Takes the greater epoch of each. When it returns no page of before is found by this node, and those it
  // has are taken back. False, and nothing is taken, if one of them is not below `kEnd`.
  bool raise(const NamespaceEpoch* epochs, size_t n);
  // Returns those of all namespaces that were ever raised, `kMost` and one at most.
  std::vector<NamespaceEpoch> all() const;
  // The greatest of those of these namespaces; 0 until one is raised.
  uint64_t greatest(const std::vector<Key>& names) const;
  // The greatest of those this node follows. Needs no lock.
  uint64_t own() const { return own_.load(std::memory_order_acquire); }
  // Another number after each change of any epoch: what was derived from them under this one holds until
  // then. Needs no lock.
  uint64_t version() const { return version_.load(std::memory_order_acquire); }
  // How often it has grown since `follow`.
  uint64_t n_raised() const { return n_raised_.load(std::memory_order_relaxed); }
  // Whether there can be any that this node was not told of.
  Vigil& vigil() { return vigil_; }

 private:
  struct Before {
    bool operator()(const Key& a, const Key& b) const {
      return std::memcmp(a.bytes, b.bytes, sizeof a.bytes) < 0;
    }
  };

  std::vector<NamespaceEpoch> all_known() const;
  bool merge(const NamespaceEpoch& told);
  void show() const;
  uint64_t greatest_of(const std::vector<Key>& names) const;

  std::atomic<uint64_t> own_{0};
  std::atomic<uint64_t> version_{0};
  std::atomic<uint64_t> n_raised_{0};
  Vigil vigil_;
  // Held while pages are taken back as well: who raises what another thread is raising returns after it.
  std::mutex raising_;
  mutable std::mutex mutex_;  // guards all below
  std::map<Key, uint64_t, Before> epochs_;
  uint64_t of_all_ = 0;
  std::vector<Key> followed_;
  std::function<void()> take_back_;
  std::function<void(const std::vector<NamespaceEpoch>&)> keep_;
  uint64_t* shown_ = nullptr;
};

}  // namespace p2pkv
