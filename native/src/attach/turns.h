// How many of an engine's requests its node serves at once.
//
// An engine opens no more lines than the limit that it is told. One that does not heed it, or one whose node
// has not noticed yet that a line is closed, may have more: then their requests wait for each other here, and
// none is refused.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>

#include "base/clock.h"

namespace p2pkv::attaching {

// Thread-safe.
class Turns {
 public:
  explicit Turns(size_t n) : n_left_(n) {}

  // True: it is this request's turn, until `give_back`. False: the deadline has passed, or `is_over()`.
  template <typename IsOver>
  bool take(const Deadline& deadline, const IsOver& is_over) {
    std::unique_lock lock(mutex_);
    while (n_left_ == 0) {
      if (deadline.passed() || is_over()) return false;
      given_back_.wait_until(lock, std::min(deadline.at(), Deadline::Clock::now() + kLook));
    }
    --n_left_;
    return true;
  }
  void give_back() {
    {
      const std::lock_guard lock(mutex_);
      ++n_left_;
    }
    given_back_.notify_one();
  }
  // Has those who wait see that it is over.
  void wake() {
    const std::lock_guard lock(mutex_);
    given_back_.notify_all();
  }

 private:
  // An engine that takes a request back wakes nobody.
  static constexpr std::chrono::milliseconds kLook{100};

  std::mutex mutex_;  // guards what follows
  std::condition_variable given_back_;
  size_t n_left_;
};

}  // namespace p2pkv::attaching
