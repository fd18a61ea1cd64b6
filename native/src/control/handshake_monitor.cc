#include "control/handshake_monitor.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <cstring>
#include <utility>

namespace p2pkv {
namespace {

constexpr int kMonitorTickMs = 1000;
constexpr uint16_t kAccepted = 0x0020;
constexpr uint16_t kDisconnected = 0x0200;
constexpr uint16_t kHandshakeFailed = 0x2000;

// The peer's number; empty if the connection is gone.
std::string host_of(int fd) {
  sockaddr_storage peer{};
  socklen_t size = sizeof peer;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) return {};
  char text[INET6_ADDRSTRLEN] = {};
  if (peer.ss_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(peer).sin_addr, text, sizeof text);
  } else if (peer.ss_family == AF_INET6) {
    const in6_addr& address = reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr;
    if (IN6_IS_ADDR_V4MAPPED(&address)) {
      inet_ntop(AF_INET, &address.s6_addr[12], text, sizeof text);
    } else {
      inet_ntop(AF_INET6, &address, text, sizeof text);
    }
  }
  return text;
}

}  // namespace

HandshakeMonitor::HandshakeMonitor(void* socket, std::shared_ptr<Refusals> refusals)
    : refusals_(std::move(refusals)),
      thread_(std::make_unique<ZmqServerThread>(
          socket, "p2pkv-monitor", kMonitorTickMs,
          ZmqServerThread::Callbacks{[this](Frames event) { note(event); }, {}, {}})) {
  thread_->start();
}

void HandshakeMonitor::note(const Frames& event) {
  uint16_t kind;
  int32_t value;
  // The event and its value, then our own address, which says nothing.
  if (event.size() != 2 || event[0].size() != sizeof kind + sizeof value) return;
  std::memcpy(&kind, event[0].data(), sizeof kind);
  std::memcpy(&value, event[0].data() + sizeof kind, sizeof value);
  switch (kind) {
    case kAccepted:
      hosts_[value] = host_of(value);
      break;
    case kHandshakeFailed:
      // It does not say whose. ZMQ hangs up in the same breath, and that event has the descriptor.
      if (std::exchange(has_failed_, true)) refusals_->note({});
      break;
    case kDisconnected:
      if (std::exchange(has_failed_, false)) refusals_->note(hosts_[value]);
      hosts_.erase(value);
      break;
    default:
      break;
  }
}

}  // namespace p2pkv
