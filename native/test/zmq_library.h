// ZMQ for the native tests: the functions that Python calls in production, out of the same library.
//
// run.py names the library in P2PKV_TEST_LIBZMQ. Sockets speak without CURVE here: what is secured is the
// Python side's business and tested there.
#pragma once

#include <dlfcn.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "base/zmq_api.h"

namespace p2pkv::test {

constexpr int kDealer = 5;
constexpr int kRouter = 6;
constexpr int kReceiveTimeout = 27;
constexpr int kLinger = 17;

struct ZmqLibrary {
  void* (*ctx_new)();
  int (*ctx_shutdown)(void*);
  int (*ctx_term)(void*);
  void* (*socket)(void*, int type);
  int (*close)(void*);
  int (*bind)(void*, const char*);
  int (*connect)(void*, const char*);
  int (*setsockopt)(void*, int option, const void*, size_t);
  int (*send)(void*, const void*, size_t, int flags);
  int (*recv)(void*, void*, size_t, int flags);
  int (*poll)(ZmqApi::PollItem*, int n, long timeout_ms);

  // Exits when the library is missing: tests that silently did not run prove nothing.
  static const ZmqLibrary& get() {
    static const ZmqLibrary library = load();
    return library;
  }

 private:
  static ZmqLibrary load() {
    const char* path = std::getenv("P2PKV_TEST_LIBZMQ");
    std::string error = "P2PKV_TEST_LIBZMQ is not set; run native/test/run.py";
    if (path == nullptr || !ZmqApi::load(path, &error)) {
      std::cerr << error << std::endl;
      std::exit(1);
    }
    void* handle = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    ZmqLibrary out;
    find(handle, "zmq_ctx_new", &out.ctx_new);
    find(handle, "zmq_ctx_shutdown", &out.ctx_shutdown);
    find(handle, "zmq_ctx_term", &out.ctx_term);
    find(handle, "zmq_socket", &out.socket);
    find(handle, "zmq_close", &out.close);
    find(handle, "zmq_bind", &out.bind);
    find(handle, "zmq_connect", &out.connect);
    find(handle, "zmq_setsockopt", &out.setsockopt);
    find(handle, "zmq_send", &out.send);
    find(handle, "zmq_recv", &out.recv);
    find(handle, "zmq_poll", &out.poll);
    return out;
  }

  template <typename Function>
  static void find(void* handle, const char* name, Function* out) {
    *out = reinterpret_cast<Function>(dlsym(handle, name));
    if (*out == nullptr) {
      std::cerr << "libzmq has no " << name << std::endl;
      std::exit(1);
    }
  }
};

class ZmqContext {
 public:
  ZmqContext() : context_(ZmqLibrary::get().ctx_new()) {}
  ~ZmqContext() { ZmqLibrary::get().ctx_term(context_); }
  ZmqContext(const ZmqContext&) = delete;
  ZmqContext& operator=(const ZmqContext&) = delete;
  void shutdown() { ZmqLibrary::get().ctx_shutdown(context_); }
  void* native() const { return context_; }

 private:
  void* context_;
};

// Used by one thread at a time.
class ZmqSocket {
 public:
  ZmqSocket(const ZmqContext& context, int type) : socket_(ZmqLibrary::get().socket(context.native(), type)) {
    const int now = 0;
    ZmqLibrary::get().setsockopt(socket_, kLinger, &now, sizeof now);
  }
  ~ZmqSocket() { ZmqLibrary::get().close(socket_); }
  ZmqSocket(const ZmqSocket&) = delete;
  ZmqSocket& operator=(const ZmqSocket&) = delete;

  void* native() const { return socket_; }
  bool bind(const std::string& address) { return ZmqLibrary::get().bind(socket_, address.c_str()) == 0; }
  bool connect(const std::string& address) {
    return ZmqLibrary::get().connect(socket_, address.c_str()) == 0;
  }

  void send(const std::vector<std::string>& frames) {
    for (size_t i = 0; i < frames.size(); ++i) {
      const int flags = i + 1 < frames.size() ? ZmqApi::kSendMore : 0;
      ZmqLibrary::get().send(socket_, frames[i].data(), frames[i].size(), flags);
    }
  }
  void send(const std::string& frame) { send(std::vector<std::string>{frame}); }

  // The next frame; nothing after `timeout_ms`.
  std::optional<std::string> receive(long timeout_ms = 10'000) {
    ZmqApi::PollItem item{socket_, 0, ZmqApi::kPollIn, 0};
    if (ZmqLibrary::get().poll(&item, 1, timeout_ms) <= 0) return std::nullopt;
    std::string frame(1 << 20, '\0');
    const int size = ZmqLibrary::get().recv(socket_, frame.data(), frame.size(), ZmqApi::kDontWait);
    if (size < 0) return std::nullopt;
    frame.resize(static_cast<size_t>(size));
    return frame;
  }

 private:
  void* socket_;
};

}  // namespace p2pkv::test
