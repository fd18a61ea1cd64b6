// What a device needs of memory that NCCL sends from.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "cuda/device.h"

namespace p2pkv::nccl {

// Memory that stays page-locked while this lives: NCCL takes host memory that its device can reach.
class LockedMemory {
 public:
  // Null, with the reason in `error`.
  static std::shared_ptr<LockedMemory> lock(std::shared_ptr<cuda::Device> device, void* base, uint64_t nbytes,
                                            std::string* error) {
    if (!device->lock_memory(base, nbytes, error)) return nullptr;
    auto locked = std::shared_ptr<LockedMemory>(new LockedMemory(std::move(device), base));
    return locked->device_->find_address(base, &locked->address_, error) ? locked : nullptr;
  }
  ~LockedMemory() { device_->unlock_memory(base_); }
  LockedMemory(const LockedMemory&) = delete;
  LockedMemory& operator=(const LockedMemory&) = delete;

  // Where the device finds its first byte.
  uint64_t address() const { return address_; }

 private:
  LockedMemory(std::shared_ptr<cuda::Device> device, void* base) : device_(std::move(device)), base_(base) {}

  const std::shared_ptr<cuda::Device> device_;
  void* const base_;
  uint64_t address_ = 0;
};

}  // namespace p2pkv::nccl
