// Waiting on a condition until a deadline, where the thread sanitizer can follow it.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "base/clock.h"

namespace p2pkv::disk {

// Returns what `is_so` says at the end. The deadline is a steady one.
template <typename Predicate>
bool wait_until(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                const Deadline& deadline, Predicate is_so) {
#if defined(__SANITIZE_THREAD__)
  // gcc 12's thread sanitizer doesn't know pthread_cond_clockwait and reports the mutex as locked twice.
  const auto left = std::max(Deadline::Clock::duration::zero(), deadline.at() - Deadline::Clock::now());
  const auto at = std::chrono::system_clock::now() +
                  std::chrono::duration_cast<std::chrono::system_clock::duration>(left);
  return changed.wait_until(lock, at, is_so);
#else
  return changed.wait_until(lock, deadline.at(), is_so);
#endif
}

// Waits for one notification, or for less.
inline void wait_once(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                      const Deadline& deadline) {
  bool is_second = false;
  wait_until(changed, lock, deadline, [&is_second] { return std::exchange(is_second, true); });
}

}  // namespace p2pkv::disk
