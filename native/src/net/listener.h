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

// Listens on `host`, on any port if `port` is 0. Peers are to be told `told`: `advertise`, or `host` if that
// is empty. No descriptor, with the reason in `error`, if that can't be done.
UniqueFd listen_on(const std::string& host, uint16_t port, const std::string& advertise, Address* told,
                   std::string* error);

// Starts to connect, without blocking: sending tells whether it was refused.
UniqueFd start_connecting(const Address& address);

// Sends small messages at once, and notices within about 20 s that the other side's host vanished without a
// word.
void set_liveness(int connection);

}  // namespace p2pkv
