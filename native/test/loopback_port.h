// A port of loopback that a test listens at, and where others of it are.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>

#include "base/fd.h"
#include "check.h"

namespace p2pkv::test {

// 127.0.0.`host`.
inline sockaddr_in at_loopback(uint16_t port, uint8_t host = 1) {
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(port);
  at.sin_addr.s_addr = htonl((127u << 24) + host);
  return at;
}

inline UniqueFd listen_at_loopback(uint16_t* port, int backlog, uint8_t host = 1) {
  UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at = at_loopback(0, host);
  socklen_t size = sizeof at;
  CHECK(bind(listener.get(), reinterpret_cast<sockaddr*>(&at), sizeof at) == 0);
  CHECK(listen(listener.get(), backlog) == 0);
  CHECK(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &size) == 0);
  *port = ntohs(at.sin_port);
  return listener;
}

}  // namespace p2pkv::test
