#include "pool/size_queues.h"

#include <algorithm>
#include <bit>

namespace p2pkv {
namespace {

constexpr uint32_t kMinTicksBits = 16;
constexpr uint32_t kStepsAnOctave = 16;
// A page's record has room for 4,096 sizes. Once there are so many of them, further ones are rounded up to
// powers of two, of which each account has 32 at most.
constexpr size_t kManySizes = 1984;

// A pool is at least 65,536 ticks, or as many as it has granules.
uint32_t tick_bits_for(uint32_t n_granules) {
  uint32_t bits = 0;
  while (n_granules >> (bits + 1) >= 1u << kMinTicksBits) ++bits;
  return bits;
}

uint32_t next_step(uint32_t n_granules) {
  if (n_granules <= kStepsAnOctave) return n_granules;
  const uint32_t step = std::bit_floor(n_granules - 1) / kStepsAnOctave;
  return (n_granules + step - 1) / step * step;
}

}  // namespace

SizeQueues::SizeQueues(PageTable& pages, uint32_t n_granules)
    : pages_(pages), n_granules_(n_granules), tick_bits_(tick_bits_for(n_granules)) {}

uint32_t SizeQueues::find(uint32_t n_granules, uint32_t account) const {
  const auto is_it = [&](const Size& one) { return one.n_granules == n_granules && one.account == account; };
  // A batch's pages are mostly of one size.
  if (last_entered_ < sizes_.size() && is_it(sizes_[last_entered_])) return last_entered_;
  const auto found = std::find_if(sizes_.begin(), sizes_.end(), is_it);
  return found == sizes_.end() ? kNone : static_cast<uint32_t>(found - sizes_.begin());
}

uint32_t SizeQueues::enter(uint32_t n_granules, uint32_t account) {
  uint32_t size = find(n_granules, account);
  if (size == kNone) {
    n_granules = rounded_up(n_granules, account);
    size = find(n_granules, account);
  }
  return use(size, n_granules, account);
}

uint32_t SizeQueues::rounded_up(uint32_t n_granules, uint32_t account) const {
  size_t n_used = 0, n_own = 0;
  for (const Size& size : sizes_) {
    if (size.n_users == 0) continue;
    ++n_used;
    if (size.account == account) ++n_own;
  }
  if (n_used >= kManySizes) return std::min(std::bit_ceil(n_granules), n_granules_);
  return n_own < kMostExact ? n_granules : std::min(next_step(n_granules), n_granules_);
}

uint32_t SizeQueues::enter_exactly(uint32_t n_granules) {
  return use(find(n_granules, 0), n_granules, 0);
}

uint32_t SizeQueues::use(uint32_t size, uint32_t n_granules, uint32_t account) {
  if (size == kNone) {
    const auto unused =
        std::find_if(sizes_.begin(), sizes_.end(), [](const Size& s) { return s.n_users == 0; });
    size = static_cast<uint32_t>(unused - sizes_.begin());
    if (unused == sizes_.end()) sizes_.emplace_back();
    sizes_[size].n_granules = n_granules;
    sizes_[size].account = account;
  }
  ++sizes_[size].n_users;
  n_charged_[account] += n_granules;
  last_entered_ = size;
  return size;
}

void SizeQueues::leave(uint32_t size) {
  --sizes_[size].n_users;
  n_charged_[sizes_[size].account] -= sizes_[size].n_granules;
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

template <typename Counts>
uint32_t SizeQueues::oldest_where(Counts counts) const {
  const Size* best = nullptr;
  for (const Size& size : sizes_) {
    if (size.oldest == kNone || !counts(size)) continue;
    if (best == nullptr || size.oldest_stamp < best->oldest_stamp) best = &size;
  }
  return best == nullptr ? kNone : best->oldest;
}

uint32_t SizeQueues::oldest() const {
  return oldest_where([](const Size&) { return true; });
}

uint32_t SizeQueues::oldest_of_account(uint32_t account) const {
  return oldest_where([=](const Size& size) { return size.account == account; });
}

uint32_t SizeQueues::oldest_of_length(uint32_t n_granules) const {
  return oldest_where([=](const Size& size) { return size.n_granules == n_granules; });
}

uint32_t SizeQueues::oldest_of_length(uint32_t n_granules, uint32_t account) const {
  return oldest_where([=](const Size& size) {
    return size.n_granules == n_granules && (size.account == account || size.account == 0);
  });
}

bool SizeQueues::is_about_as_old(uint32_t page, uint32_t eldest) const {
  // At four fifths nobody's hits suffer that can be measured, and pages rarely need a window of other sizes'.
  return (now() - pages_[page].stamp) * 5 >= (now() - pages_[eldest].stamp) * 4;
}

}  // namespace p2pkv
