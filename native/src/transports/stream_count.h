// Over how many streams a large batch is read: as many as pay.
//
// A stream more costs either end a thread and a descriptor, and brings nothing where one already fills the
// link or the cores are busy. So it is measured on the batches themselves: one more is kept while it makes
// them clearly faster, and one less is taken when that costs next to nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace p2pkv {

// Thread-safe. Knows no clock: trials come after so many batches.
class StreamCount {
 public:
  static constexpr size_t kMost = 8;
  // After so many batches another number is tried, so many times in turns with the one that is in use; twice
  // as many after each trial that has changed nothing, up to the most.
  static constexpr uint32_t kTrialEvery = 64;
  static constexpr uint32_t kTrialEveryMost = 1024;
  static constexpr uint32_t kTrialBatches = 8;
  // How much faster one stream more must be.
  static constexpr double kGain = 1.10;

  // From 1 to `most`, at first `first`.
  explicit StreamCount(size_t most, size_t first = 2);

  size_t in_use() const;
  // How many a new endpoint opens: those in use, and one more while that is being tried.
  size_t to_open() const;
  // How many of the `n_open` the next large batch takes.
  size_t next(size_t n_open);
  // A large batch over `n` streams took so long.
  void took(size_t n, double ns_per_byte);

 private:
  enum class Trial : uint8_t { kNone, kMore, kFewer };
  // With the lock.
  size_t tried() const;
  void end_trial();

  const size_t most_;
  mutable std::mutex mutex_;  // guards all below
  size_t in_use_;
  Trial trial_ = Trial::kNone;
  bool was_fewer_ = true;   // the trial before: they come in turns
  uint32_t n_batches_ = 0;  // since the last trial
  uint32_t trial_after_ = kTrialEvery;
  bool is_others_turn_ = false;
  struct Seen {
    double best = 0;  // ns a byte: what else runs makes batches slower, never faster
    uint32_t n = 0;
  };
  Seen usual_, other_;
};

}  // namespace p2pkv
