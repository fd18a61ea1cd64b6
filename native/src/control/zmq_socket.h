// A native thread that serves one ZMQ socket made in Python.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "base/thread.h"
#include "base/zmq_api.h"

namespace p2pkv {

using Frames = std::vector<std::string>;

// The thread is the socket's only user from `start` until `stop` has returned; then Python closes the socket.
// Callbacks run on that thread.
class ZmqServerThread {
 public:
  struct Callbacks {
    std::function<void(Frames)> received;
    std::function<void()> woken;   // after wake(); may be empty
    std::function<void()> ticked;  // about every tick_ms; may be empty
  };

  ZmqServerThread(void* socket, const char* name, int tick_ms, Callbacks callbacks);
  ~ZmqServerThread();
  ZmqServerThread(const ZmqServerThread&) = delete;
  ZmqServerThread& operator=(const ZmqServerThread&) = delete;

  // Once, when everything the callbacks use is there. Throws std::runtime_error if there is no thread to be
  // had.
  void start();
  // Idempotent; joins the thread. In a forked child, where the thread does not exist, it does nothing.
  void stop();
  // From any thread: makes `woken` run soon.
  void wake();

  // From callbacks only. Never blocks: a reply its receiver does not take is dropped.
  void send(const Frames& frames);
  int bind(const char* address);
  int unbind(const char* address);

 private:
  void run();
  bool receive(Frames* frames);

  void* socket_;
  const char* name_;
  const int tick_ms_;
  Callbacks callbacks_;
  int wake_fd_;
  int owner_pid_;
  std::atomic<bool> stopping_{false};
  NamedThread thread_;
};

}  // namespace p2pkv
