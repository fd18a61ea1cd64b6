// A lock that says who may write to shared memory which outlives its writers: one process at a time, and the
// kernel takes it back from one that has ended.
#pragma once

#include <string>

#include "base/clock.h"
#include "base/fd.h"

namespace p2pkv {

// Holds the lock of a memfd while it lives. A process that ends loses it when the last of its threads can
// write no more: a thread lets go of its memory before it lets go of its descriptors, and all of them share
// these. A forked child keeps it from others too, until it ends or executes a program.
class WriterLock {
 public:
  WriterLock() = default;

  // Waits until nobody else has it. Without it, the reason is in `error`.
  static WriterLock take(int memfd, const Deadline& deadline, std::string* error);

  explicit operator bool() const { return static_cast<bool>(held_); }
  void release() { held_.reset(); }

 private:
  UniqueFd held_;  // opened here and handed to nobody, since whoever has it has the lock
};

}  // namespace p2pkv
