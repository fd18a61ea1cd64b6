#include "base/buddy.h"

#include <algorithm>
#include <bit>

namespace p2pkv {

Buddy::Buddy(uint32_t n_granules) : blocks_(n_granules) {
  first_free_.fill(kNone);
  uint64_t granule = 0;
  while (granule < n_granules) {
    const uint32_t fits = std::bit_width(n_granules - granule) - 1;
    const uint32_t aligned = granule == 0 ? fits : static_cast<uint32_t>(std::countr_zero(granule));
    const uint32_t order = std::min(fits, aligned);
    push_free(static_cast<uint32_t>(granule), order);
    max_order_ = std::max(max_order_, order);
    granule += uint64_t{1} << order;
  }
  n_free_ = n_granules;
}

uint32_t Buddy::order_for(uint64_t n_granules) {
  return n_granules <= 1 ? 0 : static_cast<uint32_t>(std::bit_width(n_granules - 1));
}

void Buddy::push_free(uint32_t granule, uint32_t order) {
  const uint32_t next = first_free_[order];
  blocks_[granule] = {next, kNone, static_cast<uint8_t>(kStart | kFree | order)};
  if (next != kNone) blocks_[next].previous = granule;
  first_free_[order] = granule;
  orders_free_ |= 1u << order;
}

void Buddy::remove_free(uint32_t granule, uint32_t order) {
  const Block block = blocks_[granule];
  if (block.previous != kNone) {
    blocks_[block.previous].next = block.next;
  } else {
    first_free_[order] = block.next;
    if (block.next == kNone) orders_free_ &= ~(1u << order);
  }
  if (block.next != kNone) blocks_[block.next].previous = block.previous;
  blocks_[granule].state = kInside;
}

uint32_t Buddy::allocate(uint32_t order) {
  const uint32_t large_enough = order < kOrders ? orders_free_ >> order : 0;
  if (large_enough == 0) return kNone;
  uint32_t at_order = order + static_cast<uint32_t>(std::countr_zero(large_enough));
  const uint32_t granule = first_free_[at_order];
  remove_free(granule, at_order);
  while (at_order > order) {
    --at_order;
    push_free(granule + (1u << at_order), at_order);
  }
  blocks_[granule].state = static_cast<uint8_t>(kStart | order);
  n_free_ -= 1u << order;
  return granule;
}

void Buddy::release(uint32_t granule) {
  uint32_t order = order_of(granule);
  n_free_ += 1u << order;
  blocks_[granule].state = kInside;
  for (; order + 1 < kOrders; ++order) {
    const uint32_t buddy = granule ^ (1u << order);
    // Past the end there is no buddy; a split or allocated one has another state.
    if (buddy >= n_granules() || blocks_[buddy].state != (kStart | kFree | order)) break;
    remove_free(buddy, order);
    granule = std::min(granule, buddy);
  }
  push_free(granule, order);
}

}  // namespace p2pkv
