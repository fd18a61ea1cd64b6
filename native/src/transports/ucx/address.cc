#include "address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>

#include <cstring>

namespace p2pkv::ucx {
namespace {

sockaddr_in& as_in4(sockaddr_storage& storage) {
  return reinterpret_cast<sockaddr_in&>(storage);
}
const sockaddr_in& as_in4(const sockaddr_storage& storage) {
  return reinterpret_cast<const sockaddr_in&>(storage);
}
sockaddr_in6& as_in6(sockaddr_storage& storage) {
  return reinterpret_cast<sockaddr_in6&>(storage);
}
const sockaddr_in6& as_in6(const sockaddr_storage& storage) {
  return reinterpret_cast<const sockaddr_in6&>(storage);
}

bool is_same_host(const sockaddr_storage& a, const sockaddr_storage& b) {
  if (a.ss_family != b.ss_family) return false;
  if (a.ss_family == AF_INET) return as_in4(a).sin_addr.s_addr == as_in4(b).sin_addr.s_addr;
  return std::memcmp(&as_in6(a).sin6_addr, &as_in6(b).sin6_addr, sizeof(in6_addr)) == 0;
}

}  // namespace

bool Address::resolve(const std::string& host, uint16_t port, Address* address, std::string* error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (rc != 0) {
    *error = "cannot resolve '" + host + "': " + gai_strerror(rc);
    return false;
  }
  std::memcpy(&address->storage, found->ai_addr, found->ai_addrlen);
  address->size = found->ai_addrlen;
  freeaddrinfo(found);
  return true;
}

Address Address::from_blob(const EndpointBlob& blob) {
  Address address;
  if (blob.family == 6) {
    sockaddr_in6& in6 = as_in6(address.storage);
    in6.sin6_family = AF_INET6;
    in6.sin6_scope_id = blob.scope;
    std::memcpy(&in6.sin6_addr, blob.address, sizeof in6.sin6_addr);
    address.size = sizeof in6;
  } else {
    sockaddr_in& in4 = as_in4(address.storage);
    in4.sin_family = AF_INET;
    std::memcpy(&in4.sin_addr, blob.address, sizeof in4.sin_addr);
    address.size = sizeof in4;
  }
  address.set_port(blob.port);
  return address;
}

void Address::to_blob(EndpointBlob* blob) const {
  blob->port = port();
  if (storage.ss_family == AF_INET6) {
    blob->family = 6;
    blob->scope = as_in6(storage).sin6_scope_id;
    std::memcpy(blob->address, &as_in6(storage).sin6_addr, sizeof(in6_addr));
  } else {
    blob->family = 4;
    std::memcpy(blob->address, &as_in4(storage).sin_addr, sizeof(in_addr));
  }
}

bool Address::is_loopback() const {
  if (storage.ss_family == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&as_in6(storage).sin6_addr);
  return (ntohl(as_in4(storage).sin_addr.s_addr) >> 24) == IN_LOOPBACKNET;
}

bool Address::is_wildcard() const {
  if (storage.ss_family == AF_INET6) return IN6_IS_ADDR_UNSPECIFIED(&as_in6(storage).sin6_addr);
  return as_in4(storage).sin_addr.s_addr == htonl(INADDR_ANY);
}

uint16_t Address::port() const {
  return ntohs(storage.ss_family == AF_INET6 ? as_in6(storage).sin6_port : as_in4(storage).sin_port);
}

void Address::set_port(uint16_t port) {
  if (storage.ss_family == AF_INET6) {
    as_in6(storage).sin6_port = htons(port);
  } else {
    as_in4(storage).sin_port = htons(port);
  }
}

std::string Address::device() const {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return {};
  std::string found;
  for (const ifaddrs* each = all; each != nullptr && found.empty(); each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != storage.ss_family) continue;
    sockaddr_storage theirs{};
    std::memcpy(&theirs, each->ifa_addr,
                storage.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
    // All of 127.0.0.0/8 is the loopback device's, which lists one.
    const bool is_found = is_same_host(theirs, storage) ||
                          (is_loopback() && storage.ss_family == AF_INET &&
                           (ntohl(as_in4(theirs).sin_addr.s_addr) >> 24) == IN_LOOPBACKNET);
    if (is_found) found = each->ifa_name;
  }
  freeifaddrs(all);
  return found;
}

}  // namespace p2pkv::ucx
