// Whether there is still time for the next copy of a batch.
#pragma once

#include <cstdint>

#include "base/clock.h"

namespace p2pkv {

// Asked before each copy of a batch; looks at the clock once a MiB, which takes a thousand times as long to
// copy.
class Hurry {
 public:
  explicit Hurry(const Deadline& deadline) : deadline_(deadline) {}

  bool is_late(uint64_t nbytes) {
    if (!is_late_ && since_look_ >= kLookNbytes) {
      is_late_ = deadline_.passed();
      since_look_ = 0;
    }
    since_look_ += nbytes;
    return is_late_;
  }

 private:
  static constexpr uint64_t kLookNbytes = 1 << 20;
  const Deadline& deadline_;
  uint64_t since_look_ = 0;
  bool is_late_ = false;
};

}  // namespace p2pkv
