#include "transports/ucx/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>

#include <cstring>

namespace p2pkv::ucx {
namespace {

const sockaddr_in& as_in4(const sockaddr_storage& storage) {
  return reinterpret_cast<const sockaddr_in&>(storage);
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

bool Address::resolve(const std::string& host, Address* address, std::string* error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int rc = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (rc != 0) {
    *error = "cannot resolve '" + host + "': " + gai_strerror(rc);
    return false;
  }
  std::memcpy(&address->storage, found->ai_addr, found->ai_addrlen);
  freeaddrinfo(found);
  return true;
}

bool Address::is_loopback() const {
  if (storage.ss_family == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&as_in6(storage).sin6_addr);
  return (ntohl(as_in4(storage).sin_addr.s_addr) >> 24) == IN_LOOPBACKNET;
}

bool Address::is_wildcard() const {
  if (storage.ss_family == AF_INET6) return IN6_IS_ADDR_UNSPECIFIED(&as_in6(storage).sin6_addr);
  return as_in4(storage).sin_addr.s_addr == htonl(INADDR_ANY);
}

std::string Address::interface() const {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return {};
  std::string found;
  for (const ifaddrs* each = all; each != nullptr && found.empty(); each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != storage.ss_family) continue;
    sockaddr_storage theirs{};
    std::memcpy(&theirs, each->ifa_addr,
                storage.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
    // All of 127.0.0.0/8 is the loopback device's, which lists one.
    const bool is_found =
        is_same_host(theirs, storage) || (is_loopback() && storage.ss_family == AF_INET &&
                                          (ntohl(as_in4(theirs).sin_addr.s_addr) >> 24) == IN_LOOPBACKNET);
    if (is_found) found = each->ifa_name;
  }
  freeifaddrs(all);
  return found;
}

}  // namespace p2pkv::ucx
