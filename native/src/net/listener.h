// Listening sockets and the addresses that peers are told to connect to.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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
  std::string device = {};  // the one network interface whose packets are taken and given; empty: any
};

// An address of this host, as one of several that it is reached at.
struct LocalAddress {
  Address address;        // its port is 0
  std::string text;       // as it is written
  std::string device;     // the interface that was named instead of an address; empty if none was
  int n_prefix_bits = 0;  // of its subnet
};

// Looks up each of `wanted`: an address of this host, or an interface that has one. False, with the reason in
// `error`, if one is neither.
bool find_local(const std::vector<std::string>& wanted, std::vector<LocalAddress>* found, std::string* error);

// Whether `remote` lies in the subnet of `local`.
bool is_in_subnet(const LocalAddress& local, const Address& remote);

// Peers are to be told `told`. No descriptor, with the reason in `error`, if nothing is free there.
UniqueFd listen_on(const ListenAt& at, Address* told, std::string* error);

// Starts to connect, from `local` unless that is null, without blocking: sending tells whether it was
// refused.
UniqueFd start_connecting(const Address& address, const LocalAddress* local = nullptr);

// Sends small messages at once, and notices within about 20 s that the other side's host vanished without a
// word.
void set_liveness(int connection);

}  // namespace p2pkv
