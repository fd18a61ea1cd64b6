// Where a node's UCX listens and from where it connects: the node's own address, and the device that has it.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "frames.h"

namespace p2pkv::ucx {

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;

  // False, with the reason in `error`, if `host` has no address.
  static bool resolve(const std::string& host, uint16_t port, Address* address, std::string* error);
  static Address from_blob(const EndpointBlob& blob);
  void to_blob(EndpointBlob* blob) const;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  bool is_loopback() const;
  bool is_wildcard() const;
  uint16_t port() const;
  void set_port(uint16_t port);
  // The network interface that has this address; empty if none of this machine has.
  std::string device() const;
};

}  // namespace p2pkv::ucx
