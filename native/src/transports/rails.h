// Which of the rails that lead to one peer a slice of a batch takes, and which of them are left alone for a
// while.
//
// A rail is a way between one port here and one there: two addresses, or two RDMA devices. Knows neither
// networks nor clocks: who uses it says what the time is, and what became of what was asked for.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "transports/stream_count.h"

namespace p2pkv {

constexpr size_t kMostRails = 8;

// A set of rails, by number.
using RailSet = std::array<bool, kMostRails>;

// Shared by all endpoints that lead to a peer. Thread-safe.
class Rails {
 public:
  using Time = Deadline::Clock::time_point;
  // Seconds.
  struct Timing {
    // Until a rail that failed is tried again: at first, and at most; twice as long after each failure.
    double pause_first = 1.0;
    double pause_most = 30.0;
    // A rail that has not failed for so long since it proved itself counts as sound again.
    double forgiven_after = 10.0;
    // How long a rail may be silent while another one is heard. Between the two it is a multiple of the
    // longest silence lately that ended by itself: on a busy machine threads wait for their turn.
    double patience_least = 0.010;
    double patience_most = 0.100;
  };
  static constexpr uint32_t kProbeEvery = 100;

  explicit Rails(size_t n) : Rails(n, Timing()) {}
  Rails(size_t n, Timing timing) : n_(n), timing_(timing) {}
  size_t n() const { return n_; }

  // A rail of `usable`, which has one at least, for each slice; they count as on their way from now on. Each
  // takes the one on which it should have arrived first, by what is on its way there and by the bandwidth
  // that was seen. Of a hundred batches one gives a slice to a rail that it would not have used, to see
  // whether that has become better.
  std::vector<size_t> assign(const std::vector<uint64_t>& slices, const RailSet& usable);
  // What is on its way over a rail.
  uint64_t n_bytes_in_flight(size_t rail) const;
  // All `nbytes` of a share came within `seconds` of being asked for, when `load` bytes were on their way.
  void arrived(size_t rail, uint64_t nbytes, uint64_t load, double seconds);
  // A share of `nbytes`, of which `n_arrived` came within `seconds`, was given up.
  void gave_up(size_t rail, uint64_t nbytes, uint64_t n_arrived, double seconds);
  // Bytes a second; 0 if it has carried none.
  double bandwidth(size_t rail) const;

  // A silence ended by itself.
  void heard_again(size_t rail, double silence);
  double patience(size_t rail) const;

  // It broke, or was silent while another one was heard: it is paused.
  void failed(size_t rail, Time now);
  // It answered after it had failed.
  void proved(size_t rail, Time now);
  // Whether it has to prove itself before it is given pages.
  bool is_doubted(size_t rail) const;
  // When a doubted one is to be tried again.
  Time retry_at(size_t rail) const;

 private:
  struct Rail {
    uint64_t in_flight = 0;
    double bandwidth = 0;
    uint64_t last_sample = 0;  // the number of the batch after which its bandwidth was last seen
    double longest_silence = 0;
    bool is_doubted = false;
    uint32_t n_failures = 0;  // since it was sound
    Time proved_at{};
    Time retry_at{};
  };
  // With the lock.
  double completion(const Rail& rail, uint64_t nbytes, double unknown) const;
  double best_bandwidth() const;
  size_t least_known(const RailSet& usable) const;
  void sample(Rail& rail, double bytes_a_second);

  const size_t n_;
  const Timing timing_;
  mutable std::mutex mutex_;  // guards all below
  std::array<Rail, kMostRails> rails_{};
  uint64_t n_batches_ = 0;
};

// What is known of a peer's data ports, whichever endpoint learnt it.
struct PeerPorts {
  PeerPorts(size_t n_rails, size_t most_streams) : rails(n_rails), streams(most_streams) {}
  Rails rails;
  StreamCount streams;  // of each rail
};

// By what identifies the peer's ports. Thread-safe.
class PeerPortsBook {
 public:
  std::shared_ptr<PeerPorts> find(const std::string& ports, size_t n_rails, size_t most_streams);

 private:
  static constexpr size_t kMost = 1024;  // kept of those that no endpoint leads to
  std::mutex mutex_;                     // guards all below
  std::map<std::string, std::shared_ptr<PeerPorts>> known_;
};

}  // namespace p2pkv
