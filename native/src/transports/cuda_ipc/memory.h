// Device memory as a region of the cuda_ipc transport has it.
#pragma once

#include <cstdint>
#include <memory>

#include "base/fd.h"
#include "cuda/sharing.h"
#include "transports/registered.h"

namespace p2pkv::cuda_ipc {

struct DeviceMemory {
  std::shared_ptr<cuda::Device> device;
  // Of memory that peers may read.
  cuda::SharedRange range{};
  UniqueFd fd;     // empty where the range needs none
  UniqueFd words;  // a sealed memfd; empty: it has no words
  uint64_t words_nbytes = 0;
};

// Of a region of device memory; null for host memory. Only during a Use.
inline const DeviceMemory* device_memory_of(const RegisteredRegion& region) {
  return static_cast<const DeviceMemory*>(region.registration());
}

}  // namespace p2pkv::cuda_ipc
