// Memory of CUDA devices, registered with RDMA devices (GPUDirect RDMA): by a descriptor of the driver's, or
// by its address where the kernel has nvidia-peermem.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transports/verbs/memory.h"

namespace p2pkv::verbs {

// Registers it on every rail, by the first way by which every rail reads what the driver has written there.
// Null, with what kept each way from it in `error`.
//
// There are machines where registering succeeds and the rails then read something else. So a pattern is
// written to both ends of the memory, each rail reads it, and what was there is put back: nothing that is
// queued on a stream may use the memory meanwhile. Takes milliseconds; two seconds where a rail is silent.
std::shared_ptr<Registration> register_device_memory(const Rails& rails, uint64_t address, uint64_t nbytes,
                                                     bool readable, std::string* error);

}  // namespace p2pkv::verbs
