#include "pool/page_index.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace p2pkv {
namespace {

void store_link(uint32_t* at, uint32_t link) {
  std::atomic_ref<uint32_t>(*at).store(link, std::memory_order_release);
}

}  // namespace

PageIndex::PageIndex(std::unique_ptr<SharedRegion> region)
    : region_(std::move(region)), header_(reinterpret_cast<PageIndexHeader*>(region_->base())) {}

std::unique_ptr<PageIndex> PageIndex::create(const PageIndexHeader& about, std::string* error) {
  // Pages of one granule each would be two to a bucket.
  const uint32_t n_buckets = std::bit_ceil(std::max<uint32_t>(about.n_granules / 2, 1));
  RegionOptions options;
  options.is_lazy = true;
  auto region = SharedRegion::create(index_nbytes(n_buckets, about.n_granules), error, options);
  if (!region) return nullptr;
  auto index = std::unique_ptr<PageIndex>(new PageIndex(std::move(region)));
  *index->header_ = about;
  index->header_->n_buckets = n_buckets;
  index->heads_ = reinterpret_cast<uint32_t*>(index->region_->base() + kIndexChainsOffset);
  index->next_ = index->heads_ + n_buckets;
  return index;
}

void PageIndex::set_boot(uint64_t boot) {
  std::atomic_ref<uint64_t>(header_->boot).store(boot, std::memory_order_release);
}

void PageIndex::insert(const Key& key, uint32_t granule) {
  uint32_t* head = head_of(key);
  store_link(&next_[granule], load_link(head));
  store_link(head, granule + 1);
}

void PageIndex::erase(const Key& key, uint32_t granule) {
  uint32_t* link = head_of(key);
  while (load_link(link) != granule + 1) link = &next_[load_link(link) - 1];
  store_link(link, load_link(&next_[granule]));
}

}  // namespace p2pkv
