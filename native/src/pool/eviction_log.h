// Which pages a pool evicted, for the thread that tells the directory.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/zeroed_array.h"
#include "page/location.h"

namespace p2pkv {

struct Eviction {
  Key key;
  Location location;  // where it was until then
};

// A bounded ring: when nobody drains it the oldest records are dropped and counted, for a directory entry
// that stays too long only costs its reader a miss. Thread-safe.
class EvictionLog {
 public:
  explicit EvictionLog(size_t capacity) : ring_(capacity) {}

  // Doesn't wake the drainer: call `announce` after a batch, without the pool's lock.
  void push(const Key& key, const Location& location);
  void announce();

  // The oldest records, at most `max`; waits at most `timeout` seconds while there are none, nobody calls
  // `wake` and the log is open. Then waits `gather` seconds for more, and is woken when there are `max`.
  std::vector<Eviction> drain(size_t max, double timeout, double gather = 0);
  // Has one drainer return, or the next that comes, though there may be no records: there is other news.
  void wake();
  // Wakes the drainers; from now on they don't wait.
  void close();
  uint64_t n_dropped() const;
  uint64_t size() const;

 private:
  mutable std::mutex mutex_;          // guards all below; taken after the pool's
  std::condition_variable filled_;    // there are some
  std::condition_variable gathered_;  // there are as many as one who gathers will take
  ZeroedArray<Eviction> ring_;
  size_t first_ = 0;
  size_t size_ = 0;
  size_t n_wanted_ = SIZE_MAX;  // by one who gathers: a wake-up for every batch would cost every publish one
  uint64_t n_dropped_ = 0;
  bool is_woken_ = false;
  bool is_closed_ = false;
};

}  // namespace p2pkv
