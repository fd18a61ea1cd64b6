// The peer layer of a node that knows its peers by their links alone: there is no view, and no control plane.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <utility>

#include "peers/peer_connections.h"

namespace p2pkv::test {

inline std::shared_ptr<PeerConnections> peers_of_links(size_t n_ways) {
  PeerConnections::Hooks hooks;
  hooks.open = [](PeerId, size_t, const Deadline&) { return Opened{}; };
  hooks.scratch = [](size_t) { return nullptr; };
  hooks.fell_back = [](PeerId, size_t, PeerConnections::FallBack, bool) {};
  hooks.failed = [](std::exception_ptr) {};
  return std::make_shared<PeerConnections>(n_ways, PeerConnections::Timing{}, std::move(hooks));
}

}  // namespace p2pkv::test
