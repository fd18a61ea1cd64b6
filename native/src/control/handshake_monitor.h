// Notices who fails a CURVE handshake. Whoever has another secret has another server key too, so ZMQ drops
// him before the ZAP handler is asked; only the socket's monitor tells.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "control/refusals.h"
#include "control/zmq_socket.h"

namespace p2pkv {

class HandshakeMonitor {
 public:
  // These events zmq_socket_monitor reports of the server's socket. No event of a call of ours is among them:
  // the thread that makes it never waits for this one.
  static constexpr int kEvents =
      0x0020 | 0x0200 | 0x2000;  // ACCEPTED, DISCONNECTED, HANDSHAKE_FAILED_PROTOCOL

  // `socket`: a PAIR connected to the monitor, with ZMQ_RCVHWM 0. A full queue would block ZMQ's own thread,
  // and this one empties it faster than handshakes can fail. Whoever closes it has ended the monitoring
  // before.
  HandshakeMonitor(void* socket, std::shared_ptr<Refusals> refusals);
  ~HandshakeMonitor() { stop(); }

  void stop() { thread_->stop(); }

 private:
  void note(const Frames& event);

  const std::shared_ptr<Refusals> refusals_;
  std::map<int, std::string> hosts_;  // by descriptor: of the connections that are open
  bool has_failed_ = false;           // the handshake of the connection that is closed next
  std::unique_ptr<ZmqServerThread> thread_;
};

}  // namespace p2pkv
