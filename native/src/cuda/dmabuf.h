// Device memory as the drivers of other devices take it, those of network cards first: a descriptor.
#pragma once

#include <cstdint>
#include <string>

#include "base/fd.h"
#include "cuda/device.h"

namespace p2pkv::cuda {

// It says by which way another device comes to the memory. Not every driver has the second, and where a
// device has two ways (NVLink-C2C and PCIe) some network cards can use that one alone.
enum class DmabufWay : uint64_t { kAsItIs = 0, kOverPcie = 1 };

struct Dmabuf {
  UniqueFd fd;
  uint64_t offset = 0;  // of the memory that was asked for; as far into a host page as its address is
};

// A descriptor of the whole allocation that the memory is of, since parts of one can't be exported from
// wherever they begin. False, with the reason in `error`.
bool export_dmabuf(Device& device, uint64_t address, uint64_t nbytes, DmabufWay way, Dmabuf* exported,
                   std::string* error);

}  // namespace p2pkv::cuda
