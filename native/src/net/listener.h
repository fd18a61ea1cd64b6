// Listening sockets and the addresses that peers are told to connect to.
#pragma once

#include <cstdint>
#include <string>

#include "base/fd.h"

struct sockaddr_storage;

namespace p2pkv {

// As it stands in handshakes.
struct Address {
  uint8_t family = 4;  // 4 or 6
  uint16_t port = 0;
  uint32_t scope = 0;  // of an IPv6 link-local address
  uint8_t bytes[16] = {};
};

// The first free one is taken, or whichever the system gives if `first` is 0.
struct PortRange {
  uint16_t first = 0;
  uint16_t last = 0;
};

struct ListenAt {
  std::string host = "127.0.0.1";  // a name or an address
  std::string advertise;           // what peers are told instead, needed where `host` is a wildcard
  PortRange ports;
};

// Peers are to be told `told`. No descriptor, with the reason in `error`, if nothing is free there.
UniqueFd listen_on(const ListenAt& at, Address* told, std::string* error);

// Starts to connect, without blocking: sending tells whether it was refused.
UniqueFd start_connecting(const Address& address);

// Sends small messages at once, and notices within about 20 s that the other side's host vanished without a
// word.
void set_liveness(int connection);

}  // namespace p2pkv
