// Pins: what keeps a page's block from being reused for a while, and how many bytes of them there may be.
#include <algorithm>

#include "pool/pool.h"

namespace p2pkv {
namespace {

// Pins are bounded in bytes, but many may share a page. A guess.
constexpr size_t kMaxPins = 1 << 20;

}  // namespace

void Pool::pin(const Key* keys, size_t n, double lease_seconds, uint8_t* found, uint64_t* tickets,
               Location* locations, uint64_t most_bytes) {
  const Lock lock(mutex_);
  expire_pins();
  const int64_t deadline_ns = lease_end(lease_seconds);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t granule = pages_.find(keys[i]);
    const bool is_wanted = granule != PageTable::kNone && block_nbytes(granule) <= most_bytes;
    tickets[i] = is_wanted ? pin_one(granule, deadline_ns) : 0;
    found[i] = tickets[i] != 0;
    locations[i] = found[i] ? location_of(granule) : Location{};
    if (found[i]) most_bytes -= block_nbytes(granule);
  }
}

int64_t Pool::lease_end(double seconds) const {
  return options_.now_ns() + static_cast<int64_t>(std::clamp(seconds, 0.0, 86400.0) * 1e9);
}

// 0 if the limit doesn't allow it.
uint64_t Pool::pin_one(uint32_t granule, int64_t deadline_ns) {
  if (pins_.size() >= kMaxPins) return 0;
  const uint64_t limit = options_.pinned_limit > 0 ? options_.pinned_limit : options_.nbytes / 2;
  Page& page = pages_[granule];
  if (page.n_leases == 0) {
    if (block_nbytes(granule) > limit - std::min(limit, pinned_bytes_)) return 0;
    pinned_bytes_ += block_nbytes(granule);
    blocks_.leased(granule);
  }
  ++page.n_leases;
  return pins_.add(granule, deadline_ns);
}

uint64_t Pool::pinned_nbytes(const uint64_t* tickets, size_t n) {
  const Lock lock(mutex_);
  uint64_t nbytes = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t granule = pins_.find(tickets[i]);
    if (granule != PinTable::kNone) nbytes += block_nbytes(granule);
  }
  return nbytes;
}

void Pool::unpin(const uint64_t* tickets, size_t n, uint8_t* held) {
  const Lock lock(mutex_);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t granule = pins_.remove(tickets[i]);
    held[i] = granule != PinTable::kNone;
    if (held[i]) unpin_page(granule);
  }
}

void Pool::unpin_page(uint32_t granule) {
  if (--pages_[granule].n_leases == 0) {
    pinned_bytes_ -= block_nbytes(granule);
    blocks_.unleased(granule);
  }
  release_if_unheld(granule);
}

void Pool::expire_pins() {
  pins_.expire(options_.now_ns(), [this](uint32_t granule) { unpin_page(granule); });
}

}  // namespace p2pkv
