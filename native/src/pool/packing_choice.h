// Whether pages are packed on their way into the pool, and what came of it.
#pragma once

#include <cstdint>
#include <mutex>

namespace p2pkv {

// Mirrors COMPRESSION in p2pkv/config.py.
enum class Packing : uint8_t { kOff = 0, kLossless = 1, kAuto = 2 };

// What was packed so far; the numbers only grow, but for `is_on`.
struct PackedPages {
  uint64_t n_tried = 0;   // pages, packed or not
  uint64_t n_packed = 0;  // of these
  uint64_t tried_bytes = 0;
  uint64_t stored_bytes = 0;  // of the pool's, that they took
  uint64_t nanoseconds = 0;   // that threads looked at them and packed them
  bool is_on = false;         // whether pages are packed now
};

// Packing that is chosen automatically begins with a trial and goes on while the pages of each trial become
// smaller by a tenth at least, at a speed that no network of 10 Gbit/s outruns. If not, the next trial comes
// when 64 times as many bytes were stored as they are, so that it costs a sixty-fourth at most. Thread-safe.
class PackingChoice {
 public:
  static constexpr uint64_t kTrialBytes = 64 << 20;
  static constexpr uint64_t kTrialPages = 1024;  // of small pages
  static constexpr uint64_t kPause = 64;         // trials
  static constexpr double kLeastRatio = 1.1;
  static constexpr double kLeastSpeed = 1.25;  // bytes a nanosecond, of one thread

  explicit PackingChoice(Packing packing) : packing_(packing), is_on_(packing != Packing::kOff) {}

  // Whether pages of so many bytes together should be packed. Needs no lock where packing is off.
  bool is_wanted(uint64_t nbytes);
  // Tells what became of one page: `stored` are the bytes of its block.
  void tried(uint64_t nbytes, uint64_t stored, bool is_packed, uint64_t nanoseconds);
  PackedPages pages();

 private:
  const Packing packing_;
  std::mutex mutex_;  // guards all below
  bool is_on_;
  PackedPages all_;
  PackedPages trial_;
  uint64_t skipped_bytes_ = 0;  // since the last trial
};

}  // namespace p2pkv
