// The owner's side of the tcp transport: listens, lets readers in and gives each connection a thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "net/doorman.h"
#include "net/listener.h"
#include "transports/registered.h"
#include "transports/tcp/frames.h"
#include "transports/tcp/wire.h"

namespace p2pkv::tcp {

// At most kMaxConnections are served at a time, and fewer under a low limit of descriptors; for a further
// one, the longest idle is hung up on.
class Server {
 public:
  static constexpr size_t kMaxConnections = 1024;

  // Listens at each of `at`, which has one at least. `sealing`: null where nothing is encrypted.
  static std::unique_ptr<Server> start(const std::vector<ListenAt>& at, std::shared_ptr<RegionTable> regions,
                                       std::shared_ptr<Sealing> sealing, std::string* error);
  ~Server() { close(); }
  void close();

  // What peers are told, one for each that it listens at.
  const std::vector<Address>& addresses() const { return addresses_; }
  TokenTable& tokens() { return doorman_->tokens(); }
  // Null where nothing is encrypted.
  Sealing* sealing() const { return sealing_.get(); }
  // Hangs up on the connections of one grant.
  void drop_grant(uint64_t grant);

 private:
  struct Connection {
    Connection(UniqueFd connection, uint64_t admitted_by, std::unique_ptr<Wire> over)
        : fd(std::move(connection)), grant(admitted_by), wire(std::move(over)) {}

    UniqueFd fd;
    uint64_t grant;
    std::unique_ptr<Wire> wire;  // until its thread serves it
    NamedThread thread;
    std::atomic<int64_t> used_ns{steady_now_ns()};  // when it came, or asked last
    bool is_doomed = false;                         // hung up on for another's sake
  };

  Server(std::shared_ptr<RegionTable> regions, std::shared_ptr<Sealing> sealing)
      : regions_(std::move(regions)), sealing_(std::move(sealing)) {}
  void admit(UniqueFd fd, const Doorman::Admitted& peer);
  void make_room();
  void serve(std::list<Connection>::iterator connection);

  const pid_t pid_ = getpid();
  const std::shared_ptr<RegionTable> regions_;
  const std::shared_ptr<Sealing> sealing_;
  std::vector<Address> addresses_;
  std::unique_ptr<Doorman> doorman_;
  Wakeup stop_;       // set once, and never cleared: wakes every connection's thread
  std::mutex mutex_;  // guards all below
  std::condition_variable emptied_;
  std::list<Connection> connections_;
  NamedThread last_to_leave_;  // joined by the next one that leaves, so that at most one ended thread lingers
  bool is_closing_ = false;
};

}  // namespace p2pkv::tcp
