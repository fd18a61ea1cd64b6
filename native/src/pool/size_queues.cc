#include "pool/size_queues.h"

#include <algorithm>
#include <bit>

namespace p2pkv {
namespace {

constexpr uint32_t kMinTicksBits = 16;
constexpr uint32_t kStepsAnOctave = 16;

// A pool is at least 65,536 ticks, or as many as it has granules.
uint32_t tick_bits_for(uint32_t n_granules) {
  uint32_t bits = 0;
  while (n_granules >> (bits + 1) >= 1u << kMinTicksBits) ++bits;
  return bits;
}

uint32_t rounded_up(uint32_t n_granules) {
  if (n_granules <= kStepsAnOctave) return n_granules;
  const uint32_t step = std::bit_floor(n_granules - 1) / kStepsAnOctave;
  return (n_granules + step - 1) / step * step;
}

}  // namespace

SizeQueues::SizeQueues(PageTable& pages, uint32_t n_granules)
    : pages_(pages), n_granules_(n_granules), tick_bits_(tick_bits_for(n_granules)) {}

uint32_t SizeQueues::find(uint32_t n_granules) const {
  for (uint32_t size = 0; size < sizes_.size(); ++size) {
    if (sizes_[size].n_granules == n_granules) return size;
  }
  return kNone;
}

uint32_t SizeQueues::enter(uint32_t n_granules) {
  // A batch's pages are mostly of one size.
  if (last_entered_ < sizes_.size() && sizes_[last_entered_].n_granules == n_granules) {
    ++sizes_[last_entered_].n_users;
    return last_entered_;
  }
  uint32_t size = find(n_granules);
  if (size == kNone) {
    const auto is_exact = [](const Size& other) { return other.n_users > 0; };
    const auto n_used = static_cast<size_t>(std::count_if(sizes_.begin(), sizes_.end(), is_exact));
    if (n_used >= kMostExact) {
      n_granules = std::min(rounded_up(n_granules), n_granules_);
      size = find(n_granules);
    }
  }
  return use(size, n_granules);
}

uint32_t SizeQueues::enter_exactly(uint32_t n_granules) {
  return use(find(n_granules), n_granules);
}

uint32_t SizeQueues::use(uint32_t size, uint32_t n_granules) {
  if (size == kNone) {
    const auto unused =
        std::find_if(sizes_.begin(), sizes_.end(), [](const Size& s) { return s.n_users == 0; });
    size = static_cast<uint32_t>(unused - sizes_.begin());
    if (unused == sizes_.end()) sizes_.emplace_back();
    sizes_[size].n_granules = n_granules;
  }
  ++sizes_[size].n_users;
  last_entered_ = size;
  return size;
}

void SizeQueues::leave(uint32_t size) {
  --sizes_[size].n_users;
}

void SizeQueues::oldest_changed(Size& size) {
  size.oldest_stamp = size.oldest == kNone ? UINT64_MAX : uint64_t{pages_[size.oldest].stamp};
}

void SizeQueues::link(uint32_t granule) {
  link_used_at(granule, now());
}

void SizeQueues::link_used_at(uint32_t granule, uint64_t stamp) {
  Page& page = pages_[granule];
  Size& size = sizes_[page.size];
  page.stamp = stamp;
  page.newer = kNone;
  page.older = size.newest;
  if (size.newest == kNone) {
    size.oldest = granule;
    oldest_changed(size);
  } else {
    pages_[size.newest].newer = granule;
  }
  size.newest = granule;
}

void SizeQueues::unlink(uint32_t granule) {
  const Page& page = pages_[granule];
  Size& size = sizes_[page.size];
  (page.newer == kNone ? size.newest : pages_[page.newer].older) = page.older;
  if (page.older == kNone) {
    size.oldest = page.newer;
    oldest_changed(size);
  } else {
    pages_[page.older].newer = page.newer;
  }
}

uint32_t SizeQueues::oldest() const {
  const Size* best = nullptr;
  for (const Size& size : sizes_) {
    if (size.oldest != kNone && (best == nullptr || size.oldest_stamp < best->oldest_stamp)) best = &size;
  }
  return best == nullptr ? kNone : best->oldest;
}

bool SizeQueues::is_about_as_old(uint32_t page, uint32_t eldest) const {
  // At four fifths nobody's hits suffer that can be measured, and pages rarely need a window of other sizes'.
  return (now() - pages_[page].stamp) * 5 >= (now() - pages_[eldest].stamp) * 4;
}

}  // namespace p2pkv
