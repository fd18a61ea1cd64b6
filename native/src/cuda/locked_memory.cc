#include "cuda/locked_memory.h"

namespace p2pkv::cuda {

LockedMemory& LockedMemory::get() {
  static LockedMemory& all =
      *new LockedMemory;  // never destroyed: memory may be unlocked when the process ends
  return all;
}

Result LockedMemory::lock(void* host, uint64_t nbytes, const std::function<Result()>& lock_it) {
  const std::lock_guard lock(mutex_);
  if (const auto known = blocks_.find(host); known != blocks_.end() && known->second.nbytes == nbytes) {
    ++known->second.n_holders;
    return kSuccess;
  }
  const Result result = lock_it();
  if (result == kSuccess) blocks_[host] = {nbytes, 1};
  return result;
}

void LockedMemory::unlock(void* host, const std::function<void()>& unlock_it) {
  const std::lock_guard lock(mutex_);
  const auto known = blocks_.find(host);
  if (known == blocks_.end() || --known->second.n_holders > 0) return;
  blocks_.erase(known);
  unlock_it();
}

}  // namespace p2pkv::cuda
