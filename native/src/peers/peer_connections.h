// Reaching peers: which transport leads to whom, and connections that are lent to one batch at a time.
//
// A peer's connections are opened on demand, one more for each batch that runs at the same time, and kept for
// the next. One that timed out or lost its peer is closed. A peer that made a batch time out is left alone
// for a moment, so that a stopped node costs its deadline once and not in every call. A peer that takes
// longer to connect to than calls have time is connected to between them.
//
// Fetches and pulls of offers share a peer's connections. A fetch reads from members of the view, and opens
// connections over the control plane. A pull reads from whoever is at the other end of a link, be it in the
// view yet or not, and opens them over that link, for that link's pulls alone: docs/design.md, Transfers, has
// the reasons for what differs.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
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
  uint64_t n_late = 0;  // reads that were left for another holder: the peer is not to blame for a time-out
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
    // How long what was read from a peer counts for more than the membership's doubts of it: longer than
    // these take to be cleared up, and shorter than they take to come up when a peer stops.
    double proven = 0.7;
    // How long a connection that nobody needs is kept: each costs its owner a descriptor and a thread.
    double idle = 10.0;
  };
  enum class FallBack { kHandshakeFailed, kConnectionFailed, kMemoryOutOfReach };

  // What is done by those who know handshakes and names. All are called without a lock, on any thread; what
  // the first two throw reaches the borrower, or `failed` where there is none.
  struct Hooks {
    // Opens a connection to the peer over a way. Blocks until the deadline at most.
    std::function<Opened(PeerId peer, size_t way, const Deadline& deadline)> open;
    // Eight bytes or more of memory that a test read may overwrite; null if there is none to be had.
    std::function<std::shared_ptr<MemoryRegion>(size_t way)> scratch;
    // A way did not lead to the peer and the next is taken; `is_first`: since it last worked. Of a pull it is
    // told on another thread.
    std::function<void(PeerId peer, size_t way, FallBack why, bool is_first)> fell_back;
    // An exception that no call waits for.
    std::function<void(std::exception_ptr error)> failed;
  };

  // A node of the view, and the ways that lead to it, best first. One that is not healthy is not read from,
  // unless it was a moment ago.
  struct Member {
    PeerId id;
    bool is_healthy = true;
    std::vector<size_t> ways;
  };
  // How a pull reaches the memory that it reads.
  struct Route {
    uint64_t link = 0;         // the link to the peer
    std::vector<size_t> ways;  // that lead to the memory, best first
    // Opens a connection over the link. None: the pull is given up, and the way is not to blame.
    std::function<std::optional<Opened>(size_t way)> open;
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
  // closed, but those of links.
  void change(const std::vector<Member>& changed, const std::vector<uint64_t>& gone);
  // Lends connections to the pulls of a link from now on. No other link of this node has its number.
  void add_link(PeerId peer, uint64_t link);
  // Says that a pull did not reach memory of the peer's devices over a way that leads to the peer: which is
  // used on, for what lies elsewhere.
  void tell_out_of_reach(PeerId peer, size_t way, uint64_t link);
  // Lends none any more, and closes the idle ones that were opened over the link.
  void drop_link(PeerId peer, uint64_t link);

  // How long reads from the peer take; null for one that is not known.
  std::shared_ptr<Pace> pace_of(PeerId peer) const;

  // How a peer stands now.
  struct Standing {
    bool is_connected = false;         // `borrow_idle` would lend a connection
    bool is_reachable = false;         // or `borrow` might make one
    std::shared_ptr<const Pace> pace;  // null: it is not known
  };
  // Returns it of each of these, with one lock.
  std::vector<Standing> standings(const std::vector<PeerId>& peers);
  // Has a peer connected to, for calls to come. Does nothing if that was begun less than
  // `Timing::retry_first` ago, or has no end yet.
  void connect_ahead(PeerId peer);

  // A connection to the peer, or null if it can't be reached now. Give it back with `release`.
  ConnectionPtr borrow(PeerId peer, const Deadline& deadline);
  // A connection that is there, or null; `is_worth_connecting` says whether `borrow` might make one. Never
  // blocks.
  ConnectionPtr borrow_idle(PeerId peer, bool* is_worth_connecting);
  // Gives `then` what `borrow` returns or throws, on another thread, soon after the deadline. Where the
  // system has no thread to give, the caller does it.
  void borrow_later(PeerId peer, Deadline deadline, std::function<void(Borrowed)> then);

  // For a pull: a connection over the first way of the route that leads to the peer, or null. Blocks for as
  // long as `route.open` does, once a way. A pull has its deadline and its thread for itself, and rows that
  // it does not bring are lost, where pages are only missed: so it tries peers that calls leave alone.
  ConnectionPtr borrow_over(PeerId peer, const Route& route);

  // Takes a connection back after its batch, with the worst that became of a span.
  void release(const ConnectionPtr& connection, Status worst, ReadAmount amount);
  // Takes back a connection that was not used.
  void give_back(const ConnectionPtr& connection) { release(connection, Status::kOk, {}); }
  // Closes a lent connection instead of taking it back: from now on nothing writes to local memory.
  void discard(const ConnectionPtr& connection);

  // Of pages alone: pulls are counted where they are made.
  std::vector<Traffic> traffic() const;
  // How often a way did not lead a pull to its peer.
  uint64_t n_fallbacks_of_pulls() const { return n_fallbacks_of_pulls_; }

  // Settles what is under way as kCanceled and lends nothing any more.
  void interrupt();
  bool is_closed() const;
  // Closes every connection and waits for the threads. Idempotent.
  void close();

 private:
  using Clock = Deadline::Clock;
  struct Way {
    Clock::time_point unusable_until{};
    uint32_t n_failures = 0;          // since it worked
    bool is_being_connected = false;  // between calls
    bool has_traffic = false;
    bool is_told_of = false;  // that it does not lead to all memory
    ReadAmount amount;
  };
  // Known for as long as the view has it or a link leads to it.
  struct Peer {
    Member member;
    bool is_member = false;
    std::vector<Way> ways;
    // The same ways as the pulls of each link find them: who opened a link says itself that it is this peer,
    // and what becomes of its connections is not blamed on the peer of the view.
    std::map<uint64_t, std::vector<Way>> links;
    std::vector<ConnectionPtr> idle;  // those used last at the end
    Clock::time_point avoid_until{};
    Clock::time_point ahead_from{};  // before, nobody connects to it ahead
    Clock::time_point proven_until{};
    std::shared_ptr<Pace> pace = std::make_shared<Pace>();

    // Whether somebody may still be lent this connection.
    bool keeps(const Connection& connection) const {
      return connection.link == 0 ? is_member : links.contains(connection.link);
    }
    // Null for a link that was dropped.
    Way* find(size_t way, uint64_t link) {
      if (link == 0) return &ways[way];
      const auto known = links.find(link);
      return known != links.end() ? &known->second[way] : nullptr;
    }
    bool is_usable(const Connection& connection) {
      const Way* way = find(connection.way, connection.link);
      return way != nullptr && Clock::now() >= way->unusable_until;
    }
  };
  using Peers = std::map<PeerId, Peer>;
  struct Connecting {
    NamedThread thread;
    bool has_ended = false;
  };

  static Clock::duration to_clock(double seconds) {
    return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
  }
  static void close_all(const std::vector<ConnectionPtr>& connections);
  Peer* find(PeerId id);
  Peer& at(PeerId id);
  // Closes what nobody may be lent any more, and forgets the peer if neither the view nor a link has it. The
  // connections go to `closing`.
  void prune(Peers::iterator known, std::vector<ConnectionPtr>* closing);
  // With the lock: moves idle ones to `closing`.
  static void take_out(Peer& peer, const std::function<bool(const Connection&)>& which,
                       std::vector<ConnectionPtr>* closing);
  // An idle connection, lent now, or null and the ways to try; neither for a peer to be let alone.
  ConnectionPtr take_idle(PeerId id, std::vector<size_t>* candidates);
  // With the lock: whether pages may be read from a peer now, and over this connection of it.
  bool is_readable(const Peer& peer, Clock::time_point now) const;
  static bool leads_to(Peer& peer, const Connection& idle) {
    // What a link has opened leads to whoever said to be this peer: rows may come from there, pages may not.
    return idle.link == 0 && peer.is_usable(idle);
  }
  // With the lock: the one of those that suit that was used last, lent now, or null.
  ConnectionPtr lend(Peer& peer, const std::function<bool(const Connection&)>& suits);
  ConnectionPtr connect(PeerId id, const std::vector<size_t>& candidates, const Deadline& deadline);
  ConnectionPtr open(PeerId id, size_t way, const Deadline& deadline);
  // Lends what was opened; null if that is nothing, or all is closed.
  ConnectionPtr adopt(PeerId id, size_t way, Opened opened, uint64_t link);
  void avoid(PeerId id);
  void fall_back(PeerId id, size_t way, uint64_t link, FallBack why, bool is_pulling);
  void tell_later(PeerId id, size_t way, FallBack why, bool is_first);

  // between_calls.cc
  void connect_between_calls(PeerId id, size_t way);
  bool has_other_way(PeerId id);
  bool is_proven(PeerId id, size_t way, const Deadline& deadline);
  // Runs `body` on a thread that `close` joins; false if there is none to be had.
  bool start(std::function<void()> body);
  // With the lock.
  void have_idle_swept();
  void sweep();

  const size_t n_ways_;
  const Timing timing_;
  const Hooks hooks_;
  std::atomic<uint64_t> n_fallbacks_of_pulls_{0};
  mutable std::mutex mutex_;  // guards all below, but what is in a connection that is lent
  Peers peers_;
  std::set<ConnectionPtr> borrowed_;
  std::list<Connecting> connecting_;
  NamedThread sweeper_;
  bool is_sweeping_ = false;
  bool is_sweeper_asleep_ = false;   // until something is idle; not woken for more, which would cost a fetch
  std::condition_variable changed_;  // something is idle, or all is closed
  bool is_closed_ = false;
};

}  // namespace p2pkv
