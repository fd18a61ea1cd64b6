// Device memory of p2pkv's own, for trying out what can be done with an engine's: nothing is kept in it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/fd.h"
#include "cuda/device.h"

namespace p2pkv::cuda {

class OwnMemory {
 public:
  // The kinds that sharing.h tells of: cudaMalloc's, and that of torch's expandable segments.
  enum class Kind : uint8_t { kByHandle, kByDescriptor };

  // At least `nbytes` of them. Null, with the reason in `error`. Once `sharing_missing` says that nothing is.
  static std::unique_ptr<OwnMemory> allocate(std::shared_ptr<Device> device, uint64_t nbytes, Kind kind,
                                             std::string* error);
  virtual ~OwnMemory() = default;
  virtual uint64_t address() const = 0;
  // A descriptor for drivers of other devices, as of network cards. Empty, with the reason in `error`.
  virtual UniqueFd export_dmabuf(std::string* error) = 0;
};

}  // namespace p2pkv::cuda
