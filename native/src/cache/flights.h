// The reads of one fetch: a flight an owner, all in the air at once, and none waits for another.
//
// An owner that has stopped must cost its own pages and nobody else's. So connections that are not there yet
// are made on threads of their own, and while several owners are read, each gets short turns: bytes are moved
// by the thread that asks for them, and one that waited for a silent owner alone would leave the others'
// lying.
//
// A page that another node holds too is not waited for until the deadline: a flight that is late, as the pace
// of its peer says, is left, and its pages go on to their next holders. What is left has ended first: its
// transfer has settled and its endpoint is closed, as at a deadline, so that nothing of it is written once
// the next holder is asked.
#pragma once

#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "cache/fetch_batch.h"
#include "cache/hedges.h"
#include "cache/holder_choice.h"
#include "peers/peer_connections.h"

namespace p2pkv {

// Used by one thread, for one round of one fetch: `read` does it all.
class Flights {
 public:
  // With what late reads are left.
  struct Elsewhere {
    HolderChoice& choice;
    Hedges& hedges;
    bool may_look_again;  // when half of the time is over, what is late and known nowhere else is looked up
  };

  // `memories`: what the batch's `memory_of` counts. `elsewhere`: null if pages are read from where they are
  // located, and from nowhere else. All must outlive this.
  Flights(FetchBatch& batch, PeerConnections& peers, const std::vector<LocalMemory>& memories,
          Deadline deadline, bool check_sums, const Elsewhere* elsewhere = nullptr);
  // Calls off what has not landed, if `read` was left by an exception.
  ~Flights();
  Flights(const Flights&) = delete;
  Flights& operator=(const Flights&) = delete;

  // Reads what is located from its owners; returns by the deadline, with every owner's pages settled. Passes
  // on what a transport in Python throws.
  void read(const std::vector<FetchBatch::Owner>& owners);
  // One owner's part, as it was when it was over.
  struct Landed {
    size_t way;
    uint64_t nbytes;  // that came and were right
    int64_t ns;
  };

  const std::vector<Landed>& landed() const { return landed_; }
  // What came and was right, by the number of the transport.
  const std::vector<FetchBatch::Taken>& taken() const { return taken_; }

 private:
  using Clock = Deadline::Clock;
  class Boarding;
  // One owner's part of the fetch, under way: a leg for each registered memory, one after another.
  struct Flight {
    const FetchBatch::Owner* owner;
    PeerConnections::ConnectionPtr connection;
    size_t leg;  // the number of the one that is in the air
    Clock::time_point began;
    std::shared_ptr<Transfer> transfer;
    Clock::time_point late_at = Clock::time_point::max();  // when it is looked whether to leave it
  };

  void set_out(const FetchBatch::Owner& owner, bool is_alone);
  void take_off(const FetchBatch::Owner& owner, PeerConnections::ConnectionPtr connection);
  void board(double timeout);
  void land_all();
  // Waits for a flight's leg, and goes on with its next one; true if that was the last.
  bool land(Flight& flight);
  size_t settle(Flight& flight, Status worst, Clock::duration took, uint64_t n_late);

  // flights_late.cc
  bool avoid_slow(const FetchBatch::Owner& owner, const Connection* connection);
  bool may_go_elsewhere(const FetchBatch::Owner& owner);
  Clock::time_point late_at(const FetchBatch::Owner& owner, Clock::time_point began, Pace::Patience patience);
  // When one of so many parts of the time from then on until the deadline is over.
  Clock::time_point overdue_at(Clock::time_point from, int parts) const;
  Clock::time_point next_boarding_look() const;
  Clock::time_point next_look(const Flight& flight) const;
  // What to do about an owner whose pages are late: the reason for which they are left now, or when to look
  // again.
  struct Verdict {
    std::optional<Hedges::Why> leave;
    Clock::time_point look_at;
  };
  Verdict judge(const FetchBatch::Owner& owner, Clock::time_point began);
  // Leaves a flight that is late, if there is a better way; true if it did.
  bool leave_late(Flight& flight);
  void leave_late_boarding();
  // Goes on to the next holders of the pages of a settled group; `fate`: what is known of this one then.
  void go_on(const FetchBatch::Owner& owner, Hedges::Why why, HolderChoice::Fate fate);
  static bool is_mapped(const Connection& connection);
  static FetchBatch::Leg leg_of(const Flight& flight);
  void read_leg(Flight& flight);
  static double seconds_until(Clock::time_point at);

  FetchBatch& batch_;
  PeerConnections& peers_;
  const std::vector<LocalMemory>& memories_;
  const Deadline deadline_;
  const bool check_sums_;
  const Elsewhere* const elsewhere_;
  const Clock::time_point half_at_;  // when half of the time is over
  std::list<Flight> flying_;
  std::shared_ptr<Boarding> boarding_;  // shared with the threads that connect
  std::vector<FetchBatch::Taken> taken_;
  std::vector<Landed> landed_;
};

}  // namespace p2pkv
