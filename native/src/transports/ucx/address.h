// The node's own address, and the network interface that has it.
#pragma once

#include <sys/socket.h>

#include <string>

namespace p2pkv::ucx {

struct Address {
  sockaddr_storage storage{};

  // False, with the reason in `error`, if `host` has no address.
  static bool resolve(const std::string& host, Address* address, std::string* error);

  bool is_loopback() const;
  bool is_wildcard() const;
  // Empty if no interface of this machine has it.
  std::string interface() const;
};

}  // namespace p2pkv::ucx
