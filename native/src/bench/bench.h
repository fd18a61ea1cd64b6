// What the benchmark compares p2pkv with: plain copies, raw streams and a bare echo, each as fast as C gets.
// Nothing else uses this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "control/zmq_socket.h"
#include "transports/transport.h"

namespace p2pkv::bench {

enum class Copy : uint8_t { kMemcpy, kNonTemporal };

// Copies each span from `from` + remote to `to` + local.
void copy_spans(uint8_t* to, const uint8_t* from, const Span* spans, size_t n, Copy how);

// Asks the other end of a connected stream for `n` spans, `batch` at a time, and receives each batch with
// scatter-gather straight to its place. 0 or an errno.
int receive_spans(int fd, uint8_t* base, const Span* spans, size_t n, size_t batch);

// Answers receive_spans out of `base` until the peer hangs up. 0 or an errno.
int serve_spans(int fd, const uint8_t* base, size_t nbytes);

// A ROUTER that answers every request with as many bytes as its first eight say, at most 1 MiB.
class Echo {
 public:
  explicit Echo(void* socket);
  void start() { thread_.start(); }
  void stop() { thread_.stop(); }

 private:
  void received(Frames frames);

  const std::string zeros_;
  ZmqServerThread thread_;
};

}  // namespace p2pkv::bench
