// How long an engine's next bytes are waited for.
#pragma once

#include <algorithm>
#include <limits>

namespace p2pkv {

// Shared by who waits and by who hears how the engine is, on one thread: a stream that has begun may be
// passed on natively when its engine turns out to be stopped.
struct Patience {
  double seconds;
  double if_failing = std::numeric_limits<double>::infinity();  // seconds too, while `is_failing`
  bool is_failing = false;                                      // the engine's health check fails

  double now() const { return is_failing ? std::min(seconds, if_failing) : seconds; }
};

}  // namespace p2pkv
