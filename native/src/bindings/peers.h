// What other bindings take of the peer layer.
#pragma once

#include <vector>

#include "peers/connection.h"

namespace p2pkv {

// The registered memories of a moment, in the order of p2pkv.memory.registered.MemoryTable: by address.
struct LocalMemories {
  std::vector<LocalMemory> all;
};

}  // namespace p2pkv
