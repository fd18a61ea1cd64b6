// How many reads may be left for another holder before their time is over, and how many were.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace p2pkv {

// What is left is asked for twice: so that a network that is slow for all is not given twice the work, reads
// are left for being late only in a share of all. Thread-safe.
class Hedges {
 public:
  enum Why : size_t {
    kLate,     // most reads of that size were over by then
    kOverdue,  // a quarter of the time left was over, whatever the share
    kFailed,   // its holder was lost, or had the page no more
    kSlow,     // not begun: its holder was late a moment ago
    kUnknown,  // half of the time was over, and nobody else was known: it was looked up once more
    kWhys
  };

  // Lets one in twenty reads be left as late, and so many more at once.
  static constexpr int64_t kReadsAHedge = 20;
  static constexpr int64_t kBurst = 16;

  void note_read() {
    if (credit_.load(std::memory_order_relaxed) < kBurst * kReadsAHedge) {
      credit_.fetch_add(1, std::memory_order_relaxed);
    }
  }
  // Whether one more may be left; it counts as left then.
  bool take() {
    int64_t credit = credit_.load(std::memory_order_relaxed);
    while (credit >= kReadsAHedge) {
      if (credit_.compare_exchange_weak(credit, credit - kReadsAHedge, std::memory_order_relaxed))
        return true;
    }
    return false;
  }
  void count(Why why) { counts_[why].fetch_add(1, std::memory_order_relaxed); }
  std::array<uint64_t, kWhys> counts() const {
    std::array<uint64_t, kWhys> counts;
    std::transform(counts_.begin(), counts_.end(), counts.begin(),
                   [](const auto& count) { return count.load(std::memory_order_relaxed); });
    return counts;
  }

 private:
  std::atomic<int64_t> credit_{kBurst * kReadsAHedge};
  std::array<std::atomic<uint64_t>, kWhys> counts_{};
};

}  // namespace p2pkv
