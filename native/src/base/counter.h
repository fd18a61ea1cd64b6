// A number that only grows. Python counts calls and pages with it, where nobody waits for a lock.
#pragma once

#include <atomic>

namespace p2pkv {

// Thread-safe.
class Counter {
 public:
  void add(double n) { value_.fetch_add(n, std::memory_order_relaxed); }
  double value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
};

}  // namespace p2pkv
