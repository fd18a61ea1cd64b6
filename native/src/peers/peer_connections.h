// Reaching peers: which transport leads to whom, and connections that are lent to one batch at a time.
//
// A peer's connections are opened on demand, one more for each batch that runs at the same time, and kept for
// the next. One that timed out or lost its peer is closed. A peer that made a batch time out is left alone
// for a moment, so that a stopped node costs its deadline once and not in every call. A peer that takes
// longer to connect to than calls have time is connected to between them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/thread.h"
#include "page/status.h"
#include "peers/connection.h"

namespace p2pkv {

// What a batch has read over a connection.
struct ReadAmount {
  uint64_t n_pages = 0;
  uint64_t nbytes = 0;
  double seconds = 0;
};

// Thread-safe. Only opening a connection blocks: for one handshake a way, bounded by the deadline.
class PeerConnections {
 public:
  using ConnectionPtr = std::shared_ptr<Connection>;

  // Seconds.
  struct Timing {
    double avoid = 1.0;  // how long a peer that made a batch time out is left alone
    // A peer that was given less time than this is not blamed for a time-out.
    double fair_chance = 0.1;
    double patient_connect = 20.0;  // what a connection gets that was not made within a call
    // Until a way that did not lead to a peer is tried again: at first, and at most. Twice as long after each
    // failure, because it may have been this node that was short of something for a moment.
    double retry_first = 1.0;
    double retry_most = 30.0;
    // How long a connection that nobody needs is kept: each costs its owner a descriptor and a thread.
    double idle = 10.0;
  };
  enum class FallBack { kHandshakeFailed, kConnectionFailed };

  // What is done by those who know handshakes and names. All are called without a lock, on any thread; what
  // the first two throw reaches the borrower, or `failed` where there is none.
  struct Hooks {
    // Opens a connection to the peer over a way. Blocks until the deadline at most.
    std::function<Opened(PeerId peer, size_t way, const Deadline& deadline)> open;
    // Eight bytes or more of memory that a test read may overwrite; null if there is none to be had.
    std::function<std::shared_ptr<MemoryRegion>(size_t way)> scratch;
    // A way did not lead to the peer and the next is taken; `is_first`: since it last worked.
    std::function<void(PeerId peer, size_t way, FallBack why, bool is_first)> fell_back;
    // An exception that no call waits for.
    std::function<void(std::exception_ptr error)> failed;
  };

  // A node of the view, and the ways that lead to it, best first. One that is not healthy is not read from.
  struct Member {
    PeerId id;
    bool is_healthy = true;
    std::vector<size_t> ways;
  };
  struct Traffic {
    uint64_t peer;
    size_t way;
    ReadAmount amount;
  };
  // What a borrower in the background gets: a connection, or none, or what opening threw.
  struct Borrowed {
    ConnectionPtr connection;
    std::exception_ptr error;
  };

  PeerConnections(size_t n_ways, Timing timing, Hooks hooks)
      : n_ways_(n_ways), timing_(timing), hooks_(std::move(hooks)) {}
  ~PeerConnections() { close(); }
  PeerConnections(const PeerConnections&) = delete;
  PeerConnections& operator=(const PeerConnections&) = delete;

  size_t n_ways() const { return n_ways_; }

  // Takes what has changed in the view. Idle connections to nodes that are gone, or that were restarted, are
  // closed.
  void change(const std::vector<Member>& changed, const std::vector<uint64_t>& gone);

  // A connection to the peer, or null if it can't be reached now. Give it back with `release`.
  ConnectionPtr borrow(PeerId peer, const Deadline& deadline);
  // A connection that is there, or null; `is_worth_connecting` says whether `borrow` might make one. Never
  // blocks.
  ConnectionPtr borrow_idle(PeerId peer, bool* is_worth_connecting);
  // Gives `then` what `borrow` returns or throws, on another thread, soon after the deadline. Where the
  // system has no thread to give, the caller does it.
  void borrow_later(PeerId peer, Deadline deadline, std::function<void(Borrowed)> then);

  // Takes a connection back after its batch, with the worst that became of a span.
  void release(const ConnectionPtr& connection, Status worst, ReadAmount amount);
  // Takes back a connection that was not used.
  void give_back(const ConnectionPtr& connection) { release(connection, Status::kOk, {}); }
  // Closes a lent connection instead of taking it back: from now on nothing writes to local memory.
  void discard(const ConnectionPtr& connection);

  std::vector<Traffic> traffic() const;

  // Settles what is under way as kCanceled and lends nothing any more.
  void interrupt();
  // Closes every connection and waits for the threads. Idempotent.
  void close();

 private:
  using Clock = Deadline::Clock;
  struct Way {
    Clock::time_point unusable_until{};
    uint32_t n_failures = 0;          // since it worked
    bool is_being_connected = false;  // between calls
    bool has_traffic = false;
    ReadAmount amount;
  };
  struct Peer {
    Member member;
    std::vector<Way> ways;
    std::vector<ConnectionPtr> idle;  // those used last at the end
    Clock::time_point avoid_until{};
  };
  struct Connecting {
    NamedThread thread;
    bool has_ended = false;
  };

  Peer* find(PeerId id);
  // An idle connection, lent now, or null and the ways to try; neither for a peer to be let alone. What is to
  // be closed goes to `closing`.
  ConnectionPtr take_idle(PeerId id, std::vector<size_t>* candidates, std::vector<ConnectionPtr>* closing);
  ConnectionPtr connect(PeerId id, const std::vector<size_t>& candidates, const Deadline& deadline);
  ConnectionPtr open(PeerId id, size_t way, const Deadline& deadline);
  void connect_between_calls(PeerId id, size_t way);
  bool is_proven(PeerId id, size_t way, const Deadline& deadline);
  // Runs `body` on a thread that `close` joins; false if there is none to be had.
  bool start(std::function<void()> body);
  void avoid(PeerId id);
  void fall_back(PeerId id, size_t way, FallBack why);
  // With the lock.
  void have_idle_swept();
  void sweep();

  const size_t n_ways_;
  const Timing timing_;
  const Hooks hooks_;
  mutable std::mutex mutex_;                  // guards all below, but what is in a connection that is lent
  std::unordered_map<uint64_t, Peer> peers_;  // by key
  std::set<ConnectionPtr> borrowed_;
  std::list<Connecting> connecting_;
  NamedThread sweeper_;
  bool is_sweeping_ = false;
  bool is_sweeper_asleep_ = false;   // until something is idle; not woken for more, which would cost a fetch
  std::condition_variable changed_;  // something is idle, or all is closed
  bool is_closed_ = false;
};

}  // namespace p2pkv
