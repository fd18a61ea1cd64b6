// Keys for the thread that tells the directory.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "page/location.h"

namespace p2pkv::disk {

// A queue of keys with a bound: when nobody drains it the oldest go and are counted, for a directory entry
// that stays too long, or is missing, only costs a miss. Thread-safe.
class KeyLog {
 public:
  explicit KeyLog(size_t capacity) : capacity_(capacity) {}

  // A batch is announced once.
  void push(const Key* keys, size_t n);
  // The oldest keys, at most `max`; waits at most until the deadline while there are none and it is open.
  std::vector<Key> drain(size_t max, const Deadline& deadline);
  // Wakes the drainers; from now on they don't wait.
  void close();
  uint64_t n_lost() const;

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable filled_;
  std::deque<Key> keys_;
  uint64_t n_lost_ = 0;
  bool is_closed_ = false;
};

}  // namespace p2pkv::disk
