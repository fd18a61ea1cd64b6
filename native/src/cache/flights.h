// The reads of one fetch: a flight an owner, all in the air at once, and none waits for another.
//
// An owner that has stopped must cost its own pages and nobody else's. So connections that are not there yet
// are made on threads of their own, and while several owners are read, each gets short turns: bytes are moved
// by the thread that asks for them, and one that waited for a silent owner alone would leave the others'
// lying.
#pragma once

#include <list>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "cache/fetch_batch.h"
#include "peers/peer_connections.h"

namespace p2pkv {

// Used by one thread, for one round of one fetch: `read` does it all.
class Flights {
 public:
  // `memories`: what the batch's `memory_of` counts. All must outlive this.
  Flights(FetchBatch& batch, PeerConnections& peers, const std::vector<LocalMemory>& memories,
          Deadline deadline, bool check_sums);
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
  };

  void set_out(const FetchBatch::Owner& owner, bool is_alone);
  void take_off(const FetchBatch::Owner& owner, PeerConnections::ConnectionPtr connection);
  void board(double timeout);
  void land_all();
  // Waits for a flight's leg, and goes on with its next one; true if that was the last.
  bool land(Flight& flight);
  static FetchBatch::Leg leg_of(const Flight& flight);
  void read_leg(Flight& flight);
  double seconds_left() const;

  FetchBatch& batch_;
  PeerConnections& peers_;
  const std::vector<LocalMemory>& memories_;
  const Deadline deadline_;
  const bool check_sums_;
  std::list<Flight> flying_;
  std::shared_ptr<Boarding> boarding_;  // shared with the threads that connect
  std::vector<FetchBatch::Taken> taken_;
  std::vector<Landed> landed_;
};

}  // namespace p2pkv
