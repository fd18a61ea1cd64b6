// How many calls are under way at once: who comes beyond that waits for his turn.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>

#include "base/clock.h"

namespace p2pkv {

// Thread-safe. Who leaves gives his place to who has waited longest, so that nobody who comes meanwhile is
// faster.
class CallLimit {
 public:
  explicit CallLimit(size_t most) : n_left_(most) {}

  // Waits for a place; false, which is counted, if there was none by the deadline, or once this is closed.
  // `gives_up` is asked every 50 ms, without the lock; a place may have come when it says so.
  bool enter(const Deadline& deadline, const std::function<bool()>& gives_up = {});
  void leave();
  // Lets nobody in any more, nor wait. Idempotent.
  void close();

  uint64_t n_refused();
  size_t n_waiting();

 private:
  struct Waiter {
    std::condition_variable changed;
    bool is_in = false;
  };

  std::mutex mutex_;  // guards all below
  std::list<Waiter> waiting_;
  size_t n_left_;
  uint64_t n_refused_ = 0;
  bool is_closed_ = false;
};

}  // namespace p2pkv
