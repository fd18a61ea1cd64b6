// The owner's side of the shm transport: hands memfds to readers and tells them, by hanging up, that it is
// gone.
#pragma once

#include <memory>
#include <string>

#include "transports/region_server.h"

namespace p2pkv::shm {

// Null, with the reason in `error`.
std::unique_ptr<RegionServer> start_server(std::shared_ptr<RegionTable> regions, std::string* error);

}  // namespace p2pkv::shm
