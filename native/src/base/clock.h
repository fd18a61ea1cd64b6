// Deadlines: computed once from a timeout, then passed down.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace p2pkv {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // `seconds` from now; negative counts as zero, and more than a day as a day.
  static Deadline after(double seconds) {
    const double bounded = std::clamp(seconds, 0.0, 86400.0);
    return Deadline(Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(bounded * 1e9)));
  }

  static Deadline until(Clock::time_point at) { return Deadline(at); }

  bool passed() const { return Clock::now() >= at_; }

  // Milliseconds left for poll(2), rounded up so that a wait never spins on its last fraction.
  int poll_ms() const {
    const auto left = std::chrono::duration_cast<std::chrono::microseconds>(at_ - Clock::now()).count();
    return left <= 0 ? 0 : static_cast<int>((left + 999) / 1000);
  }

  Clock::time_point at() const { return at_; }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

// Nanoseconds of the steady clock.
inline int64_t steady_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Deadline::Clock::now().time_since_epoch())
      .count();
}

// Seconds of the steady clock, as the shard counts them.
inline uint32_t steady_seconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint32_t>(std::chrono::duration_cast<std::chrono::seconds>(now).count());
}

}  // namespace p2pkv
