// Which keys were used before, roughly and in a fixed amount of memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "page/location.h"

namespace p2pkv {

// A table of fingerprints without buckets: a newcomer replaces whoever had its place, so that what was used
// long ago fades. A wrong "yes" (once in 2^31) writes a page that could have been left out. Thread-safe.
class UseSketch {
 public:
  // Counts a use; whether there was one before.
  bool note(const Key& key) {
    std::atomic<uint32_t>& slot = slot_of(key);
    const uint32_t tag = tag_of(key);
    const uint32_t before = slot.load(std::memory_order_relaxed);
    const bool is_known = (before & ~kTwice) == tag;
    const uint32_t after = is_known ? tag | kTwice : tag;
    if (after != before) slot.store(after, std::memory_order_relaxed);
    return is_known;
  }
  bool was_used_twice(const Key& key) const {
    return slot_of(key).load(std::memory_order_relaxed) == (tag_of(key) | kTwice);
  }

 private:
  static constexpr uint32_t kTwice = 1;
  static constexpr size_t kSlots = 1 << 20;  // 4 MiB; a guess: 64 GiB of pages of 64 KiB

  // other bits than the slot goes by; 0 is an empty slot
  static uint32_t tag_of(const Key& key) { return static_cast<uint32_t>(hash_of(key) >> 32) << 1 | 2; }
  std::atomic<uint32_t>& slot_of(const Key& key) const { return slots_[hash_of(key) % kSlots]; }

  std::unique_ptr<std::atomic<uint32_t>[]> slots_{new std::atomic<uint32_t>[kSlots]()};
};

}  // namespace p2pkv
