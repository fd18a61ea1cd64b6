// Admits CURVE clients by their public key (ZAP, https://rfc.zeromq.org/spec/27), natively: a node lets new
// peers in while its interpreter is busy. Server sockets must set a ZAP domain and enforce it; then, without
// a living handler, nobody is admitted.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "control/refusals.h"
#include "control/zmq_socket.h"

namespace p2pkv {

class ZapHandler {
 public:
  // `socket`: a ROUTER bound to inproc://zeromq.zap.01 before any server socket is bound.
  // `admitted`: raw 32-byte public keys.
  ZapHandler(void* socket, std::string domain, std::vector<std::string> admitted,
             std::shared_ptr<Refusals> refusals);
  ~ZapHandler() { stop(); }

  void stop() { thread_->stop(); }

 private:
  void answer(Frames request);

  const std::string domain_;
  const std::vector<std::string> admitted_;
  const std::shared_ptr<Refusals> refusals_;
  std::unique_ptr<ZmqServerThread> thread_;
};

}  // namespace p2pkv
