// Connects queue pairs in threads of its own: when a peer's hardware address is not known, the kernel waits
// for it for up to a second, and neither the control loop nor a call with a deadline can.
#pragma once

#include <condition_variable>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/thread.h"
#include "transports/verbs/queue_pair.h"

namespace p2pkv::verbs {

// A queue pair on its way to a peer. Whoever made it may let go of it at any time.
struct Attempt {
  std::shared_ptr<CompletionQueue> completions;  // outlives the pair
  std::shared_ptr<QueuePair> pair;
  LaneBlob peer{};
  uint32_t first_packet = 0;
};
// Empty if the pair was connected, else the reason.
using Outcome = std::shared_future<std::string>;

// Thread-safe.
class Connector {
 public:
  ~Connector() { close(); }
  Outcome connect(Attempt attempt);
  // Attempts that have not begun fail; one under way is waited for, a second at most. Idempotent.
  void close();

 private:
  struct Queued {
    Attempt attempt;
    std::promise<std::string> outcome;
  };
  void run();

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<Queued> queue_;
  std::vector<NamedThread> threads_;  // started when all are busy
  size_t n_idle_ = 0;
  bool is_closed_ = false;
};

// Whether the outcome is known within `seconds`.
bool is_known(const Outcome& outcome, double seconds);

}  // namespace p2pkv::verbs
