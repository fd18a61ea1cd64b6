// What has been page-locked, and how often: the driver refuses the same memory a second time.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

#include "cuda/driver.h"

namespace p2pkv::cuda {

// Of all devices together, as page-locked memory is. Thread-safe.
class LockedMemory {
 public:
  static LockedMemory& get();

  // `lock_it` is called if nobody has locked it yet.
  Result lock(void* host, uint64_t nbytes, const std::function<Result()>& lock_it);
  // `unlock_it` is called for the last holder.
  void unlock(void* host, const std::function<void()>& unlock_it);

 private:
  struct Block {
    uint64_t nbytes;
    int n_holders;
  };
  std::mutex mutex_;  // guards blocks_, and is held for the driver's call: its answer must be what they say
  std::map<void*, Block> blocks_;
};

}  // namespace p2pkv::cuda
