// How long reads from one peer take, as its readers see it, and since when that is too long.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"

namespace p2pkv {

// Estimates, for each order of magnitude of bytes, the time that 99 of 100 reads stay below. Follows what it
// is told: a network that gets slower is late for some reads, and then it is not. Thread-safe, without locks:
// what two threads note at once may count once.
class Pace {
 public:
  using Clock = Deadline::Clock;

  // When something is late: twice what most take, and never less than kFloor.
  struct Patience {
    Clock::duration late;
    Clock::duration most;  // what 99 of 100 take; 0 while too few have told
  };
  Patience patience(uint64_t nbytes) const;
  Clock::duration late_after(uint64_t nbytes) const { return patience(nbytes).late; }
  // The same of opening a connection.
  Patience patience_connecting() const;
  Clock::duration late_connecting() const { return patience_connecting().late; }
  // A read of so many bytes has come to its end after that time.
  void note(uint64_t nbytes, Clock::duration took);
  void note_connected(Clock::duration took);
  // Between what half of the reads of so many bytes stay below. Both are what reads of this size took, if
  // enough have told; else it is known of the nearest size that has: with the bytes it goes neither down by
  // more nor up by more than they do. 0 while none has told.
  struct Usual {
    int64_t least_ns;
    int64_t most_ns;
  };
  Usual usual(uint64_t nbytes) const;

  // The peer was late, so that other holders of its pages are better asked for a while: twice as long each
  // time, until it is in time again.
  void was_late();
  void was_in_time();
  bool is_slow() const;

  // A thread that is not run for a moment, and a turn of a fetch among several owners, take about as long.
  static constexpr std::chrono::microseconds kFloor{1000};

 private:
  // Where a class has told so few reads, a guess counts: 20 ms, and 10 ns a byte, which is 100 MB/s.
  static constexpr uint32_t kFewReads = 8;
  // The longest of so many reads counts, as far as one may count; after them the estimate goes down as well.
  static constexpr uint32_t kFirstReads = 64;
  static constexpr int64_t kGuessNs = 20'000'000;
  static constexpr int64_t kGuessNsAByte = 10;
  static constexpr int64_t kConnectingGuessNs = 2 * kGuessNs;
  static constexpr int64_t kFirstSlowNs = 50'000'000;
  static constexpr int64_t kMostSlowNs = 1'000'000'000;
  static constexpr size_t kConnecting = 0;  // the class of no bytes
  static constexpr size_t kClasses = 48;

  // What is usual moves by one part of so many with each read: noise of a tenth, and a peer that takes twice
  // as long is known after half a dozen.
  static constexpr int64_t kPartsOfAStep = 8;

  struct Class {
    std::atomic<int64_t> ns{0};
    std::atomic<int64_t> usual_ns{0};
    std::atomic<uint32_t> n{0};
  };

  static size_t class_of(uint64_t nbytes);
  static int64_t guess_ns(uint64_t nbytes);
  Patience patience(size_t index, int64_t guess_ns) const;
  bool has_told(size_t index) const { return classes_[index].n.load(std::memory_order_relaxed) >= kFewReads; }
  void note_class(size_t index, Clock::duration took, int64_t guess_ns);
  static void note_usual(Class& known, uint32_t n, int64_t took_ns);

  std::array<Class, kClasses> classes_;
  std::atomic<int64_t> slow_until_ns_{0};
  std::atomic<uint32_t> n_late_{0};  // in a row
};

}  // namespace p2pkv
