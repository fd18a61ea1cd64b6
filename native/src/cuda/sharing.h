// Memory of a device between processes of one host (CUDA IPC): what its owner tells of it, and how another
// process maps it.
//
// The driver knows two kinds of memory. What cuMemAlloc (and so cudaMalloc) gives is named by a handle of 64
// bytes; while another process maps it, its owner must not free it. What cuMemCreate gives is named by a
// descriptor, and lives as long as anybody has it. Whoever maps either may write to it, but where the driver
// can make a mapping of the second kind read-only: so this is for processes that trust each other.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "base/fd.h"
#include "cuda/device.h"

namespace p2pkv::cuda {

// What one process tells another of its memory; bytes of a frame. `kind` 1: `handle` names the allocation; 2:
// the descriptor that goes along does.
struct SharedRange {
  uint32_t kind;
  uint32_t reserved;
  uint64_t allocation_nbytes;
  uint64_t offset;  // of the memory in the allocation
  std::array<uint8_t, 64> handle;
};
static_assert(sizeof(SharedRange) == 88);

// Empty, or what is missing for sharing memory; loads the driver.
std::string sharing_missing();

// Tells how others map memory of this process. False, with the reason in `error`: it may be of a memory pool,
// made without being meant for others, or consist of several allocations. `fd` is empty for the first kind.
bool share_memory(Device& device, uint64_t address, uint64_t nbytes, SharedRange* range, UniqueFd* fd,
                  std::string* error);

// Memory of another process, as `device` reaches it. Copies from it must have ended when this goes.
class MappedMemory {
 public:
  // `range` and `fd` as they came from its owner, who may be wrong, or lie. Null, with the reason in `error`.
  static std::unique_ptr<MappedMemory> map(std::shared_ptr<Device> device, const SharedRange& range, int fd,
                                           uint64_t nbytes, std::string* error);
  virtual ~MappedMemory() = default;
  // Of the first byte that was shared.
  virtual uint64_t address() const = 0;
  // Whether it is known to lie on the device that maps it; else it may be another one's, which that reaches.
  InnerMemory memory() const { return memory_; }

 private:
  InnerMemory memory_ = InnerMemory::kAny;
};

}  // namespace p2pkv::cuda
