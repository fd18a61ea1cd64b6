// A shard's fast way in: look-ups, puts and drops on TCP connections of their own, one thread for all of
// them.
//
// ZeroMQ hands each message over between four threads, which is most of what a look-up costs there. A peer
// that passed the control plane's CURVE handshake asks for a channel and gets a one-time token and a session
// key; what it then sends is sealed with that key, so that a channel is no weaker than the control socket.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "directory/shard.h"
#include "directory/touch_budget.h"
#include "net/acceptor.h"
#include "net/listener.h"
#include "page/promoter.h"

namespace p2pkv {

class DirectoryServer : public Acceptor {
 public:
  // At most, and fewer under a low limit of descriptors; for a further one the longest idle is hung up on.
  static constexpr size_t kMaxChannels = 1024;

  struct Stats {
    uint64_t requests;
    uint64_t channels;
    uint64_t touches;  // of pages that were there
  };

  // Null, with the reason in `error`, if it can't listen there.
  static std::shared_ptr<DirectoryServer> start(const ListenAt& at, std::shared_ptr<Shard> shard,
                                                std::string* error);

  // Answers as this boot from now on; 0, as in the beginning: hangs up on who asks.
  virtual void announce(uint64_t boot) = 0;
  // Hands promotions to `promoter` from now on; with null, nothing is ever there to be promoted. Whoever
  // promotes calls back nothing any more when this server is destroyed.
  virtual void serve_promotions(std::shared_ptr<Promoter> promoter) = 0;
  // Has what readers tell of this node's pages done by `touch` from now on, on the server's thread; null:
  // nobody. Until `close` at the latest, what it stands on must be there.
  virtual void serve_touches(Touch touch) = 0;
  virtual Stats stats() = 0;
  // Hangs up on everybody and waits for the threads. Idempotent.
  virtual void close() = 0;
};

}  // namespace p2pkv
