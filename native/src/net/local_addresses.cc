// The addresses of this host, by themselves and by their interfaces.
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "net/listener.h"

namespace p2pkv {
namespace {

struct Candidate {
  LocalAddress local;
  std::string interface;
  bool is_link_local;
};

int n_bits(const uint8_t* mask, size_t n) {
  int bits = 0;
  for (size_t i = 0; i < n; ++i) bits += __builtin_popcount(mask[i]);
  return bits;
}

bool to_candidate(const ifaddrs& entry, Candidate* candidate) {
  if (entry.ifa_addr == nullptr || entry.ifa_netmask == nullptr) return false;
  const bool is_v6 = entry.ifa_addr->sa_family == AF_INET6;
  if (!is_v6 && entry.ifa_addr->sa_family != AF_INET) return false;
  Address& address = candidate->local.address;
  const auto* in4 = reinterpret_cast<const sockaddr_in*>(entry.ifa_addr);
  const auto* in6 = reinterpret_cast<const sockaddr_in6*>(entry.ifa_addr);
  const void* bytes = is_v6 ? static_cast<const void*>(&in6->sin6_addr) : &in4->sin_addr;
  const size_t size = is_v6 ? 16 : 4;
  std::memcpy(address.bytes, bytes, size);
  address.family = is_v6 ? 6 : 4;
  address.scope = is_v6 ? in6->sin6_scope_id : 0;
  const auto* mask4 = reinterpret_cast<const sockaddr_in*>(entry.ifa_netmask);
  const auto* mask6 = reinterpret_cast<const sockaddr_in6*>(entry.ifa_netmask);
  const void* mask = is_v6 ? static_cast<const void*>(&mask6->sin6_addr) : &mask4->sin_addr;
  candidate->local.n_prefix_bits = n_bits(static_cast<const uint8_t*>(mask), size);
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(is_v6 ? AF_INET6 : AF_INET, bytes, text, sizeof text);
  candidate->local.text = text;
  candidate->interface = entry.ifa_name;
  candidate->is_link_local = is_v6 && IN6_IS_ADDR_LINKLOCAL(&in6->sin6_addr);
  if (candidate->is_link_local) candidate->local.text += "%" + candidate->interface;
  return true;
}

std::vector<Candidate> own_addresses() {
  std::vector<Candidate> own;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return own;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> list(first, freeifaddrs);
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    Candidate candidate;
    if (to_candidate(*entry, &candidate)) own.push_back(std::move(candidate));
  }
  // An interface stands for its first IPv4 address, or for one of IPv6 that is not link-local.
  std::stable_sort(own.begin(), own.end(), [](const Candidate& a, const Candidate& b) {
    const auto rank = [](const Candidate& c) {
      return c.is_link_local ? 2 : (c.local.address.family == 6 ? 1 : 0);
    };
    return rank(a) < rank(b);
  });
  return own;
}

// Every address of 127.0.0.0/8 is this host's, though only one is listed.
bool is_loopback(const std::string& text, LocalAddress* local) {
  if (inet_pton(AF_INET, text.c_str(), local->address.bytes) != 1 || local->address.bytes[0] != 127)
    return false;
  local->text = text;
  local->n_prefix_bits = 8;
  return true;
}

}  // namespace

bool find_local(const std::vector<std::string>& wanted, std::vector<LocalAddress>* found,
                std::string* error) {
  const std::vector<Candidate> own = own_addresses();
  for (const std::string& name : wanted) {
    const auto known = std::find_if(own.begin(), own.end(), [&](const Candidate& candidate) {
      return candidate.local.text == name || candidate.interface == name;
    });
    if (LocalAddress local; known == own.end() && is_loopback(name, &local)) {
      found->push_back(std::move(local));
      continue;
    }
    if (known == own.end()) {
      std::string all;
      for (const Candidate& candidate : own) {
        all += (all.empty() ? "" : ", ") + candidate.local.text + " (" + candidate.interface + ")";
      }
      *error = "'" + name + "' is neither an address nor an interface of this host, which has " +
               (all.empty() ? "none" : all);
      return false;
    }
    found->push_back(known->local);
    if (known->local.text != name) found->back().device = name;
  }
  return true;
}

bool is_in_subnet(const LocalAddress& local, const Address& remote) {
  if (local.address.family != remote.family) return false;
  if (local.address.scope != 0 && local.address.scope != remote.scope) return false;
  int left = local.n_prefix_bits;
  for (size_t i = 0; left > 0; ++i, left -= 8) {
    const auto mask = static_cast<uint8_t>(left >= 8 ? 0xff : 0xff << (8 - left));
    if ((local.address.bytes[i] & mask) != (remote.bytes[i] & mask)) return false;
  }
  return true;
}

}  // namespace p2pkv
