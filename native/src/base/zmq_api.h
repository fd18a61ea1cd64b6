// The libzmq that pyzmq bundles, found at run time: sockets are made and secured in Python and handed to
// native threads, so both sides must use the same library. Declares the few functions native threads call.
#pragma once

#include <cstddef>
#include <string>

namespace p2pkv {

struct ZmqApi {
  // As in zmq.h; that header is not part of pyzmq's wheel, and this part of the ABI is frozen.
  struct alignas(void*) Message {
    unsigned char opaque[64];
  };
  struct PollItem {
    void* socket;
    int fd;
    short events;
    short revents;
  };
  static constexpr int kDontWait = 1;
  static constexpr int kSendMore = 2;
  static constexpr short kPollIn = 1;

  int (*msg_init)(Message*);
  int (*msg_init_size)(Message*, size_t);
  void* (*msg_data)(Message*);
  size_t (*msg_size)(const Message*);
  int (*msg_close)(Message*);
  int (*msg_more)(const Message*);
  int (*msg_recv)(Message*, void* socket, int flags);
  int (*msg_send)(Message*, void* socket, int flags);
  int (*poll)(PollItem*, int n, long timeout_ms);
  int (*bind)(void* socket, const char* address);
  int (*unbind)(void* socket, const char* address);
  int (*zmq_errno)();
  // libsodium's BLAKE2b, bundled beside libzmq; null where libzmq was built without it.
  int (*generichash)(unsigned char* out, size_t out_size, const unsigned char* in, unsigned long long in_size,
                     const unsigned char* key, size_t key_size);
  // Its ChaCha20-Poly1305 of RFC 8439, which may work in place; null likewise.
  int (*aead_seal)(unsigned char* sealed, unsigned long long* sealed_size, const unsigned char* message,
                   unsigned long long size, const unsigned char* also, unsigned long long also_size,
                   const unsigned char* unused, const unsigned char* nonce, const unsigned char* key);
  int (*aead_open)(unsigned char* message, unsigned long long* size, unsigned char* unused,
                   const unsigned char* sealed, unsigned long long sealed_size, const unsigned char* also,
                   unsigned long long also_size, const unsigned char* nonce, const unsigned char* key);

  // Finds the functions in the loaded library at `path`. False, with the reason in `error`.
  static bool load(const char* path, std::string* error);
  // Loaded once; `load` must have succeeded.
  static const ZmqApi& get();
};

}  // namespace p2pkv
