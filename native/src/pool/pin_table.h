// Pins that callers hold on pages, each with a lease that bounds it in time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace p2pkv {

// Not thread-safe. A ticket is good once, for the pin it was given for, however its slot is reused.
class PinTable {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  // Returns the ticket; never 0.
  uint64_t add(uint32_t page, int64_t deadline_ns) {
    uint32_t slot = first_free_;
    if (slot == kNone) {
      slot = static_cast<uint32_t>(pins_.size());
      pins_.push_back({0, kNone, kNone, 1});
    } else {
      first_free_ = pins_[slot].next_free;
    }
    Pin& pin = pins_[slot];
    pin.page = page;
    pin.deadline_ns = deadline_ns;
    if (deadline_ns < earliest_ns_) earliest_ns_ = deadline_ns;
    ++size_;
    return uint64_t{pin.sequence} << 32 | slot;
  }

  // The page whose pin this is, or kNone when it is gone already or never was.
  uint32_t find(uint64_t ticket) const {
    const auto slot = static_cast<uint32_t>(ticket);
    return slot < pins_.size() && pins_[slot].sequence == ticket >> 32 ? pins_[slot].page : kNone;
  }
  // The same, and the pin is gone.
  uint32_t remove(uint64_t ticket) {
    const uint32_t page = find(ticket);
    return page == kNone ? kNone : remove_slot(static_cast<uint32_t>(ticket));
  }

  // Calls `on_expired(page)` for each pin whose lease ended at `now_ns` or before, after removing it. Looks
  // at the pins only when one may have expired.
  template <typename OnExpired>
  void expire(int64_t now_ns, OnExpired on_expired) {
    if (now_ns < earliest_ns_) return;
    earliest_ns_ = std::numeric_limits<int64_t>::max();
    for (uint32_t slot = 0; slot < pins_.size(); ++slot) {
      if (pins_[slot].page == kNone) continue;
      if (pins_[slot].deadline_ns <= now_ns) {
        on_expired(remove_slot(slot));
      } else if (pins_[slot].deadline_ns < earliest_ns_) {
        earliest_ns_ = pins_[slot].deadline_ns;
      }
    }
  }

  size_t size() const { return size_; }

 private:
  struct Pin {
    int64_t deadline_ns;
    uint32_t page;  // kNone: the slot is free
    uint32_t next_free;
    uint32_t sequence;
  };

  uint32_t remove_slot(uint32_t slot) {
    Pin& pin = pins_[slot];
    const uint32_t page = pin.page;
    pin.page = kNone;
    if (++pin.sequence == 0) pin.sequence = 1;  // ticket 0 stays unused
    pin.next_free = first_free_;
    first_free_ = slot;
    --size_;
    return page;
  }

  std::vector<Pin> pins_;
  uint32_t first_free_ = kNone;
  size_t size_ = 0;
  int64_t earliest_ns_ = std::numeric_limits<int64_t>::max();  // no lease ends before; may be too early
};

}  // namespace p2pkv
