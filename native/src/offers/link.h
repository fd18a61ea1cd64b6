// A sealed connection to one other node, over which both sides send messages whenever they like.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

#include "net/sealed_stream.h"
#include "offers/offer_frames.h"
#include "peers/connection.h"

namespace p2pkv::offers {

// A way as nodes compare theirs: it leads somewhere only from where its domain is the same.
inline std::string way_text(const std::string& name, const std::string& domain) {
  return name + " " + domain;
}

// Any thread may post; one thread, the LinkServer's, receives.
class Link {
 public:
  // `on_blocked` is called, perhaps with a lock of the caller's held, when what was posted can't be sent at
  // once: `send_rest` is to be called when it can.
  Link(uint64_t id, std::unique_ptr<SealedStream> stream, std::function<void(Link&)> on_blocked)
      : id_(id), stream_(std::move(stream)), on_blocked_(std::move(on_blocked)) {}

  uint64_t id() const { return id_; }
  int fd() const { return stream_->fd(); }
  // The node at the other end; its key is 0 until it said so.
  uint64_t node_key() const { return node_key_; }
  PeerId peer() const { return {node_key_, boot_}; }
  // The ways over which that node reads devices' memory, as `way_text` says them.
  void set_direct(std::set<std::string> ways);
  bool reads_directly(const std::string& way);
  void introduce(PeerId peer) {
    boot_ = peer.boot;  // first: whoever finds the key finds its boot
    node_key_ = peer.key;
  }

  // Sends a message, or queues it: never blocks. False if the link is lost or its peer reads nothing any
  // more.
  bool post(Kind kind, uint64_t request_id, uint32_t count, std::string_view body);
  bool reply(const wire::Header& to, wire::ReplyStatus status, std::string_view body);

  // The server's: sends what is queued; false: the link is broken.
  bool send_rest(bool* is_blocked);
  // The server's: the next message, in memory of its own. False: none now, or `is_lost`.
  bool receive(std::string* message, bool* is_lost);

  // The other side finds the connection ended, and every later post fails.
  void cut();
  bool is_lost() const { return is_lost_; }

 private:
  // What a peer that does not read may cost.
  static constexpr size_t kMaxQueued = 64 << 20;
  bool post_header(const wire::Header& header, std::string_view body);

  const uint64_t id_;
  const pid_t pid_ = getpid();
  std::mutex mutex_;  // guards the stream
  const std::unique_ptr<SealedStream> stream_;
  const std::function<void(Link&)> on_blocked_;
  std::atomic<uint64_t> node_key_{0};
  std::atomic<uint64_t> boot_{0};
  std::atomic<bool> is_lost_{false};
  std::mutex direct_mutex_;  // guards direct_
  std::set<std::string> direct_;
};

}  // namespace p2pkv::offers
