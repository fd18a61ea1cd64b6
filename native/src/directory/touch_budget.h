// What readers tell a node of its pages that they have read (docs/wire.md, TOUCH), and how much of it counts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "base/clock.h"
#include "page/location.h"

namespace p2pkv {

// Makes those of the pages that are there the last to be evicted, the first one the very last. Returns how
// many were there.
using Touch = std::function<size_t(const Key* keys, size_t n)>;

// How many touches a node takes: a touch costs it some 100 ns and the pool's lock, and those of hundreds of
// readers must not keep look-ups waiting. What is beyond is no loss, for touches are a sample anyway. Not
// thread-safe.
class TouchBudget {
 public:
  static constexpr int64_t kASecond = 65536;
  static constexpr int64_t kBurst = 16384;

  explicit TouchBudget(int64_t (*now_ns)() = steady_now_ns) : now_ns_(now_ns), last_ns_(now_ns()) {}

  // How many of so many may be taken now; they count as taken then.
  size_t take(size_t wanted) {
    const int64_t now_ns = now_ns_();
    last_ns_ = std::max(last_ns_, now_ns - kSecondNs);  // what was earned before is more than a burst
    const int64_t earned = (now_ns - last_ns_) * kASecond / kSecondNs;
    last_ns_ += earned * kSecondNs / kASecond;
    left_ = std::min(kBurst, left_ + earned);
    const auto taken = std::min<int64_t>(left_, static_cast<int64_t>(wanted));
    left_ -= taken;
    return static_cast<size_t>(taken);
  }

 private:
  static constexpr int64_t kSecondNs = 1'000'000'000;

  int64_t (*const now_ns_)();
  int64_t last_ns_;
  int64_t left_ = kBurst;
};

}  // namespace p2pkv
