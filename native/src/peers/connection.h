// A connection to a peer: an endpoint whose handshake is over, and what is read over it.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "peers/pace.h"
#include "transports/transport.h"

namespace p2pkv {

// A node in one of its boots.
struct PeerId {
  uint64_t key = 0;
  uint64_t boot = 0;
  friend auto operator<=>(const PeerId&, const PeerId&) = default;
};

// What opening a way to a peer yields: an endpoint that is bound to it, and its pool's region, which a link
// does not tell. Both are null where the peer was not reached.
struct Opened {
  std::shared_ptr<BoundEndpoint> endpoint;
  std::shared_ptr<RemoteRegion> remote;
};

// Lent to one batch at a time; then its fields are the borrower's alone.
struct Connection {
  PeerId peer;
  size_t way = 0;  // the number of its transport in this node's order of preference
  std::shared_ptr<BoundEndpoint> endpoint;
  std::shared_ptr<RemoteRegion> remote;
  std::shared_ptr<Pace> pace;  // the peer's, over whatever way
  uint64_t link = 0;           // the number of the link that it was opened over; 0: the control plane
  // What links have told of the peer's memories, by the link's number and the peer's for the memory: one link
  // does not say what another one reads.
  std::map<std::pair<uint64_t, uint32_t>, std::shared_ptr<RemoteRegion>> regions;
  bool is_pulling = false;  // lent to a pull, which waits for no interpreter
  bool has_read = false;    // a batch over it came to its end
  Deadline::Clock::time_point idle_since{};
};

// Registered local memory, as reads see it: its address, and its region with each transport, by number; null
// where that transport does not have it.
struct LocalMemory {
  int64_t address = 0;
  std::vector<std::shared_ptr<MemoryRegion>> regions;
  int64_t nbytes = 0;
  bool is_writable_host = false;  // by reads, without a detour
};

}  // namespace p2pkv
