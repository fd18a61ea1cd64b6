// Which granule a key's page begins at, in shared memory: the owner of a pool writes it, and processes of its
// host that map the pool look pages up in it by themselves (pool/mapped_pool.h).
//
// It says where to look, and proves nothing: who finds a granule here reads its record and its word. So it
// may be read while it is written, and goes on to be of use when its owner has ended.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "page/location.h"
#include "page/region.h"

namespace p2pkv {

// The beginning of an index. Engines and nodes of one version of attaching have the same (attach/frames.h).
struct PageIndexHeader {
  uint64_t owner;  // the node's key
  uint64_t boot;   // the one that locations name; it changes
  uint64_t region_nbytes;
  uint64_t data_offset;
  uint32_t granule;
  uint32_t n_granules;
  uint32_t n_buckets;  // a power of two
  uint32_t region;     // its number, as in locations
  uint64_t is_kept;    // 1: the memory outlives its owner, who may be followed by another one
};

// Chains of granules, one for each bucket of keys: `heads` and `next` hold a granule and 1, or 0.
constexpr size_t kIndexChainsOffset = 4096;

constexpr size_t index_nbytes(uint32_t n_buckets, uint32_t n_granules) {
  return kIndexChainsOffset + (size_t{n_buckets} + n_granules) * sizeof(uint32_t);
}

inline uint32_t load_link(const uint32_t* at) {
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(at)).load(std::memory_order_acquire);
}

// Not thread-safe: the pool's lock guards it.
class PageIndex {
 public:
  // `about` has all but the number of buckets. Null, with the reason in `error`.
  static std::unique_ptr<PageIndex> create(const PageIndexHeader& about, std::string* error);

  int fd() const { return region_->fd(); }
  void set_boot(uint64_t boot);
  // The page with this key, which no other one has, begins at this granule. Its word is even.
  void insert(const Key& key, uint32_t granule);
  // Starts loading what `insert` will need.
  void prefetch(const Key& key) const { __builtin_prefetch(head_of(key), 1); }
  // The page begins there no more.
  void erase(const Key& key, uint32_t granule);

 private:
  explicit PageIndex(std::unique_ptr<SharedRegion> region);

  uint32_t* head_of(const Key& key) const { return heads_ + (hash_of(key) & (header_->n_buckets - 1)); }

  const std::unique_ptr<SharedRegion> region_;
  PageIndexHeader* const header_;
  uint32_t* heads_ = nullptr;
  uint32_t* next_ = nullptr;
};

}  // namespace p2pkv
