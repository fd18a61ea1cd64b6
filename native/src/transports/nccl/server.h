// The owner's side of the nccl transport: lets readers in and gives each a session with a thread.
#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "base/thread.h"
#include "net/sealed_door.h"
#include "transports/nccl/session.h"

namespace p2pkv::nccl {

class Server {
 public:
  // Null, with the reason in `error`. `means` outlives it.
  static std::unique_ptr<Server> start(const ListenAt& at, Means* means, std::shared_ptr<RegionTable> regions,
                                       std::string* error);
  ~Server() { close(); }
  // Returns when NCCL has let go of everything. Idempotent.
  void close();

  // This end's half of a handshake, which lets one peer in once.
  std::string make_half(const Instance& instance, std::string* error);

 private:
  struct Served {
    Served(SealedStream stream, Means* means, std::shared_ptr<RegionTable> regions)
        : session(std::move(stream), means, std::move(regions)) {}
    Session session;
    NamedThread thread;
  };

  Server(Means* means, std::shared_ptr<RegionTable> regions)
      : means_(means),
        regions_(std::move(regions)),
        door_(kDoor, [this](SealedStream stream) { admit(std::move(stream)); }) {}
  void admit(SealedStream stream);
  void serve(std::list<Served>::iterator served);

  Means* const means_;
  const std::shared_ptr<RegionTable> regions_;
  const pid_t pid_ = getpid();
  std::mutex mutex_;  // guards the four below
  std::condition_variable emptied_;
  std::list<Served> served_;
  NamedThread last_to_leave_;  // joined by the next one that leaves, so that at most one ended thread lingers
  bool is_closing_ = false;
  SealedDoor door_;  // last: it admits into all of the above
};

}  // namespace p2pkv::nccl
