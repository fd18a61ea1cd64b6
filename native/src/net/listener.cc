#include "net/listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

namespace p2pkv {
namespace {

struct Resolved {
  sockaddr_storage storage{};
  socklen_t size = 0;
};

bool resolve(const std::string& host, uint16_t port, Resolved* resolved, std::string* error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (rc != 0) {
    *error = "cannot resolve '" + host + "': " + gai_strerror(rc);
    return false;
  }
  std::memcpy(&resolved->storage, found->ai_addr, found->ai_addrlen);
  resolved->size = found->ai_addrlen;
  freeaddrinfo(found);
  return true;
}

Address to_address(const Resolved& resolved) {
  Address address;
  if (resolved.storage.ss_family == AF_INET6) {
    const auto& in6 = reinterpret_cast<const sockaddr_in6&>(resolved.storage);
    address.family = 6;
    address.port = ntohs(in6.sin6_port);
    address.scope = in6.sin6_scope_id;
    std::memcpy(address.bytes, &in6.sin6_addr, 16);
  } else {
    const auto& in4 = reinterpret_cast<const sockaddr_in&>(resolved.storage);
    address.port = ntohs(in4.sin_port);
    std::memcpy(address.bytes, &in4.sin_addr, 4);
  }
  return address;
}

socklen_t to_sockaddr(const Address& address, sockaddr_storage* storage) {
  *storage = {};
  if (address.family == 6) {
    auto* in6 = reinterpret_cast<sockaddr_in6*>(storage);
    in6->sin6_family = AF_INET6;
    in6->sin6_port = htons(address.port);
    in6->sin6_scope_id = address.scope;
    std::memcpy(&in6->sin6_addr, address.bytes, 16);
    return sizeof *in6;
  }
  auto* in4 = reinterpret_cast<sockaddr_in*>(storage);
  in4->sin_family = AF_INET;
  in4->sin_port = htons(address.port);
  std::memcpy(&in4->sin_addr, address.bytes, 4);
  return sizeof *in4;
}

void set_port(uint16_t port, sockaddr_storage* storage) {
  if (storage->ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(storage)->sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in*>(storage)->sin_port = htons(port);
  }
}

// What the socket sends leaves by the interface, and what comes by another one is not for it. Connections
// that it accepts inherit that.
bool bind_to_device(int socket, const std::string& device) {
  return device.empty() || setsockopt(socket, SOL_SOCKET, SO_BINDTODEVICE, device.c_str(),
                                      static_cast<socklen_t>(device.size())) == 0;
}

// A socket that listens, and in `local` where.
UniqueFd bind_first_free(const ListenAt& at, Resolved* local, std::string* error) {
  const PortRange& ports = at.ports;
  for (uint32_t port = ports.first; port <= ports.last; ++port) {
    // a socket each: one that found its port taken while it began to listen stays bound
    UniqueFd listener(socket(local->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int on = 1;
    setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (!bind_to_device(listener.get(), at.device)) {
      *error = "cannot bind to the interface '" + at.device + "': " + std::strerror(errno) +
               "; give its address instead";
      return {};
    }
    set_port(static_cast<uint16_t>(port), &local->storage);
    auto* const address = reinterpret_cast<sockaddr*>(&local->storage);
    if (bind(listener.get(), address, local->size) == 0 && listen(listener.get(), SOMAXCONN) == 0 &&
        getsockname(listener.get(), address, &local->size) == 0)
      return listener;
    if (errno != EADDRINUSE) break;
  }
  const std::string one = std::to_string(ports.first);
  const std::string which = ports.first == ports.last ? one : one + "-" + std::to_string(ports.last);
  *error = "cannot listen on " + at.host + ":" + which + ": " + std::strerror(errno);
  return {};
}

bool is_wildcard(const Address& address) {
  return std::all_of(std::begin(address.bytes), std::end(address.bytes),
                     [](uint8_t byte) { return byte == 0; });
}

}  // namespace

UniqueFd listen_on(const ListenAt& at, Address* told, std::string* error) {
  Resolved local;
  if (!resolve(at.host, 0, &local, error)) return {};
  UniqueFd listener = bind_first_free(at, &local, error);
  if (!listener) return {};
  *told = to_address(local);
  if (!at.advertise.empty()) {
    Resolved resolved;
    if (!resolve(at.advertise, told->port, &resolved, error)) return {};
    *told = to_address(resolved);
  }
  if (is_wildcard(*told)) {
    *error = "peers can't connect to '" + at.host + "': give an address of this host, or one to advertise";
    return {};
  }
  return listener;
}

UniqueFd start_connecting(const Address& address, const LocalAddress* local) {
  sockaddr_storage storage;
  socklen_t size = to_sockaddr(address, &storage);
  UniqueFd connection(socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  setsockopt(connection.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (local != nullptr) {
    // The port is chosen by connect(2), so that many may share one.
    setsockopt(connection.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
    sockaddr_storage from;
    const socklen_t from_size = to_sockaddr(local->address, &from);
    // Where this fails the address has gone: the connection comes to nothing, as it does when a link is down.
    if (!bind_to_device(connection.get(), local->device) ||
        bind(connection.get(), reinterpret_cast<sockaddr*>(&from), from_size) != 0)
      return {};
  }
  // In progress or refused: sending tells.
  (void)connect(connection.get(), reinterpret_cast<sockaddr*>(&storage), size);
  return connection;
}

void set_liveness(int connection) {
  const auto set = [connection](int option, int value) {
    setsockopt(connection, IPPROTO_TCP, option, &value, sizeof value);
  };
  const int on = 1;
  setsockopt(connection, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  set(TCP_NODELAY, 1);
  set(TCP_KEEPIDLE, 5);
  set(TCP_KEEPINTVL, 5);
  set(TCP_KEEPCNT, 3);
  set(TCP_USER_TIMEOUT, 20000);
}

}  // namespace p2pkv
