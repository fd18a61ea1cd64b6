// Memory that other processes share with this one, or it with them, page-locked where devices copy out of it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/device.h"
#include "page/page_taker.h"

namespace p2pkv::cuda {

// One mapping, in chunks that are locked when they are used first: locking takes some 40 us a MiB, and keeps
// other calls of the driver waiting. Thread-safe. Unlocks all when it goes, which must be before the
// unmapping.
class Lockable {
 public:
  static constexpr uint64_t kChunk = 16 << 20;
  // How much one call may lock: it takes about as long as the copies that it saves.
  struct Budget {
    uint64_t most;           // bytes of all mappings of the process together
    uint64_t left = kACall;  // bytes
  };

  Lockable(const uint8_t* base, uint64_t nbytes, bool is_read_only, std::shared_ptr<Device> device);
  ~Lockable();
  Lockable(const Lockable&) = delete;
  Lockable& operator=(const Lockable&) = delete;

  // Whether all of these bytes of the mapping are locked now. False: there is no budget for it, or the driver
  // has refused once.
  bool lock(const uint8_t* from, uint64_t nbytes, Budget* budget);
  // Where the chunk ends that a byte lies in: nothing may be copied across it in one go.
  const uint8_t* end_of_chunk(const uint8_t* at) const {
    return base_ + (static_cast<uint64_t>(at - base_) / kChunk + 1) * kChunk;
  }
  bool begins_chunk(const uint8_t* at) const { return static_cast<uint64_t>(at - base_) % kChunk == 0; }

 private:
  static constexpr uint64_t kACall = 4 * kChunk;
  enum class State : uint8_t { kUnlocked, kLocked, kRefused };

  bool lock_chunk(size_t chunk, Budget* budget);
  uint64_t nbytes_of(size_t chunk) const;

  const uint8_t* const base_;
  const uint64_t nbytes_;
  const bool is_read_only_;
  const std::shared_ptr<Device> device_;  // which locks for all devices
  std::mutex mutex_;                      // guards chunks_
  std::vector<State> chunks_;
};

}  // namespace p2pkv::cuda
