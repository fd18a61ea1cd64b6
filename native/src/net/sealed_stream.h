// Frames over a TCP connection that nobody without the session's key can read, forge, repeat or reorder.
//
// A frame is the length of what follows (4 bytes) and a message encrypted and authenticated with
// ChaCha20-Poly1305 (RFC 8439; libsodium's, bundled with pyzmq). Its nonce is the direction and the number of
// the frame, so a frame fits in one place of one connection only.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"

namespace p2pkv {

using SessionKey = std::array<uint8_t, 32>;

enum class Side : uint32_t { kReader = 0, kOwner = 1 };

// Used by one thread at a time; nothing here blocks.
class SealedStream {
 public:
  enum class Progress { kFrame, kBlocked, kLost };

  // The largest message; as over ZMQ (MAX_MESSAGE of wire.py).
  static constexpr size_t kMaxMessage = 1 << 20;

  // Whether libsodium is there.
  static bool is_available();

  SealedStream(UniqueFd connection, const SessionKey& key, Side side);

  // Bytes that go out as they are, before any frame: the Hello.
  void put_plain(std::string_view bytes) { outgoing_.append(bytes); }
  // Queues a message of `head` followed by `body`, of kMaxMessage bytes at most.
  void put(std::string_view head, std::string_view body);
  // Sends what is queued as far as that goes. False: the connection is broken.
  bool flush();
  bool has_outgoing() const { return n_sent_ < outgoing_.size(); }
  size_t n_outgoing() const { return outgoing_.size() - n_sent_; }

  // Takes the next frame; kFrame: `message` is valid until the next call. kLost: the connection has ended, or
  // what came is not what the other side sealed.
  Progress receive();
  std::string_view message() const { return message_; }

  // The other side finds the connection ended, even if a forked child has a copy of it.
  void shut_down();

  int fd() const { return connection_.get(); }

 private:
  static constexpr size_t kLengthBytes = 4;
  static constexpr size_t kTagBytes = 16;

  std::array<uint8_t, 12> nonce(Side from, uint64_t number) const;
  // Opens the first frame in `incoming_` if it is all there.
  Progress open_frame();
  void shrink();

  UniqueFd connection_;
  SessionKey key_;
  Side side_;
  uint64_t n_put_ = 0;
  uint64_t n_received_ = 0;
  std::string outgoing_;
  size_t n_sent_ = 0;
  std::vector<uint8_t> incoming_;
  size_t n_incoming_ = 0;  // bytes of `incoming_` that were received
  size_t n_consumed_ = 0;  // of these, what belongs to frames already opened
  std::string_view message_;
};

}  // namespace p2pkv
