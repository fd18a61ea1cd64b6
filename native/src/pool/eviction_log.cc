#include "pool/eviction_log.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace p2pkv {
namespace {

#if defined(__SANITIZE_THREAD__)
// gcc 12's thread sanitizer doesn't know pthread_cond_clockwait and reports the mutex as locked twice.
using WaitClock = std::chrono::system_clock;
#else
using WaitClock = std::chrono::steady_clock;
#endif

}  // namespace

void EvictionLog::push(const Key& key, const Location& location) {
  const std::lock_guard lock(mutex_);
  if (ring_.size() == 0) {
    ++n_dropped_;
    return;
  }
  if (size_ == ring_.size()) {
    first_ = (first_ + 1) % ring_.size();
    --size_;
    ++n_dropped_;
  }
  ring_[(first_ + size_) % ring_.size()] = {key, location};
  ++size_;
}

void EvictionLog::announce() {
  filled_.notify_one();
  {
    const std::lock_guard lock(mutex_);
    if (size_ < n_wanted_) return;
  }
  gathered_.notify_all();
}

namespace {

WaitClock::time_point seconds_from_now(double seconds) {
  const auto bounded =
      std::chrono::nanoseconds(static_cast<int64_t>(std::clamp(seconds, 0.0, 86400.0) * 1e9));
  return WaitClock::now() + std::chrono::duration_cast<WaitClock::duration>(bounded);
}

}  // namespace

std::vector<Eviction> EvictionLog::drain(size_t max, double timeout, double gather) {
  std::unique_lock lock(mutex_);
  filled_.wait_until(lock, seconds_from_now(timeout),
                     [this] { return size_ > 0 || is_woken_ || is_closed_; });
  if ((size_ > 0 || is_woken_) && gather > 0) {
    n_wanted_ = std::min(n_wanted_, max);
    gathered_.wait_until(lock, seconds_from_now(gather), [&] { return size_ >= max || is_closed_; });
    n_wanted_ = SIZE_MAX;  // another who gathers meanwhile sleeps on to its own end at worst
  }
  is_woken_ = false;
  std::vector<Eviction> drained(std::min(max, size_));
  for (Eviction& eviction : drained) {
    eviction = ring_[first_];
    first_ = (first_ + 1) % ring_.size();
  }
  size_ -= drained.size();
  return drained;
}

void EvictionLog::wake() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(is_woken_, true)) return;
  }
  filled_.notify_one();
}

void EvictionLog::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
  }
  filled_.notify_all();
  gathered_.notify_all();
}

uint64_t EvictionLog::n_dropped() const {
  const std::lock_guard lock(mutex_);
  return n_dropped_;
}

uint64_t EvictionLog::size() const {
  const std::lock_guard lock(mutex_);
  return size_;
}

}  // namespace p2pkv
