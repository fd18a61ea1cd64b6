// The transports built into the native core.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "p2pkv/transport.h"

namespace p2pkv {

// Peers of the same host, user and network namespace map each other's sealed memfds. Null, with the reason in
// `error`.
std::shared_ptr<Transport> make_shm_transport(std::string* error);

struct TcpOptions {
  std::string host = "127.0.0.1";  // to listen on; a name or an address
  uint16_t port = 0;               // 0: any
  uint32_t streams = 2;            // connections an endpoint reads over, 1 to 8
  std::string advertise;           // what peers connect to; needed only when `host` is a wildcard
};

class TcpTransportBase : public Transport {
 public:
  virtual uint16_t port() const = 0;
};

// Peers anywhere. Null, with the reason in `error`.
std::shared_ptr<TcpTransportBase> make_tcp_transport(const TcpOptions& options, std::string* error);

}  // namespace p2pkv
