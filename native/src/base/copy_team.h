// The copies of a large batch, shared between the thread that makes them and one helper of the process.
//
// One core's copies may leave memory bandwidth unused. Whether a second thread pays depends on the machine
// and on what else runs: so it is measured on the batches themselves, and batches are shared while that takes
// clearly less time.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "base/thread.h"

namespace p2pkv {

// Copies that depend on nothing but their own number.
struct Copies {
  size_t n;
  uint64_t nbytes;  // of all together
  // Makes one. Called once for a number, by any thread of the team; it neither blocks nor throws.
  std::function<void(size_t)> make;
};

// Makes copies 0, 1, 2 and so on until all are made or `is_over`; returns how many are made. Those are done:
// all that they loaded was loaded before, and all that they stored is stored before, what the caller does
// next. No thread is at a further one.
// Asks `is_over` each time some 128 KiB were copied by this thread, and before that not.
//
// Waits for the helper to end what it is at, 128 KiB or a copy that is larger.
size_t make_copies(const Copies& copies, const std::function<bool()>& is_over);

// Which of two ways takes less time a byte, as seen so far: the better one is taken, and the other now and
// then, because what else runs changes. Not thread-safe.
class TwoWays {
 public:
  enum Way : uint8_t { kAlone, kShared };
  Way next();
  void took(Way way, double ns_per_byte);

 private:
  std::array<double, 2> ns_per_byte_{};  // by way; 0: never tried
  uint32_t n_ = 0;
};

// The helper. Batches of fewer bytes than kLeastShared, those of a second thread while the helper is lent to
// the first, and all where there is one core or nobody holds a team, are copied alone.
class CopyTeam {
 public:
  static constexpr uint64_t kLeastShared = 2 << 20;

  enum class Zeal : uint8_t {
    kMeasured,
    kAlways,  // shares every batch of two copies and more: for tests, until the team is gone
  };

  // The team of this process, with its thread: made for the first who asks and gone when the last lets go.
  // Null where this process has one core only, or the system no thread to give.
  static std::shared_ptr<CopyTeam> hire(Zeal zeal = Zeal::kMeasured);
  // The team, if there is one. It does not outlive a fork.
  static std::shared_ptr<CopyTeam> current();

  ~CopyTeam();

  // As make_copies, always with the helper; `n_helped`, if given, is how many copies it made.
  size_t share(const Copies& copies, const std::function<bool()>& is_over, size_t* n_helped = nullptr);
  // As make_copies, with the helper or without.
  size_t make(const Copies& copies, const std::function<bool()>& is_over);

 private:
  struct Job;

  CopyTeam() = default;
  void help();

  const pid_t pid_ = getpid();
  std::mutex lent_;  // held by the thread whose job the helper is lent to
  TwoWays ways_;     // guarded by lent_

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  Job* job_ = nullptr;  // that the helper may begin
  bool is_helping_ = false;
  bool is_closing_ = false;

  NamedThread helper_;
};

struct LargeCopies {
  uint64_t alone;   // batches of at least kLeastShared that one thread copied
  uint64_t shared;  // by two threads
};
// These are counts of this process, and only grow.
LargeCopies large_copies();

}  // namespace p2pkv
