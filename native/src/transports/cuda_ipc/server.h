// The owner's side of the cuda_ipc transport: tells readers how device memory is mapped, and asks for it
// back.
#pragma once

#include <memory>
#include <string>

#include "transports/region_server.h"

namespace p2pkv::cuda_ipc {

// Null, with the reason in `error`.
std::unique_ptr<RegionServer> start_server(std::shared_ptr<RegionTable> regions, std::string* error);

}  // namespace p2pkv::cuda_ipc
