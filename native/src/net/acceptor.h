// What lets a peer in during a handshake of the control plane.
#pragma once

#include <string>
#include <string_view>

namespace p2pkv {

class Acceptor {
 public:
  virtual ~Acceptor() = default;
  // Takes the peer's half of a handshake and returns this side's; empty, with the reason in `error`, when the
  // peer is refused. Never blocks on the peer.
  virtual std::string accept(std::string_view remote, std::string* error) = 0;
};

}  // namespace p2pkv
