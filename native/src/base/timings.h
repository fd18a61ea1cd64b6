// How long things took, as histograms: threads add to them without a lock, and whoever is asked for metrics
// reads.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace p2pkv {

// Histograms of one kind, by a label and a size class, both of them numbers here. Thread-safe.
class Timings {
 public:
  // Nanoseconds. The quickest calls take 10 us; a deadline of some seconds is rare, and what is above counts
  // as such.
  static constexpr std::array<int64_t, 17> kBounds = {
      10'000,      25'000,      50'000,      100'000,       250'000,      500'000,
      1'000'000,   2'500'000,   5'000'000,   10'000'000,    25'000'000,   50'000'000,
      100'000'000, 250'000'000, 500'000'000, 1'000'000'000, 2'500'000'000};

  struct Reading {
    std::array<uint64_t, kBounds.size() + 1> counts;  // by the bound that was not passed; the last: above all
    uint64_t sum_ns;
  };

  // `size_bounds`, ascending: a size belongs to the class of the first bound that it does not exceed, or to
  // one more.
  Timings(size_t n_labels, std::vector<uint64_t> size_bounds);

  Timings(const Timings&) = delete;
  Timings& operator=(const Timings&) = delete;

  void add(size_t label, uint64_t size, int64_t ns);
  size_t n_labels() const { return n_labels_; }
  size_t n_classes() const { return size_bounds_.size() + 1; }
  // All classes of the first label, then those of the next.
  std::vector<Reading> read() const;

 private:
  struct Histogram {
    std::array<std::atomic<uint64_t>, kBounds.size() + 1> counts{};
    std::atomic<uint64_t> sum_ns{0};
  };

  const size_t n_labels_;
  const std::vector<uint64_t> size_bounds_;
  std::vector<Histogram> histograms_;
};

// Measures from its making on.
class Stopwatch {
 public:
  int64_t ns() const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began_).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point began_ = Clock::now();
};

}  // namespace p2pkv
