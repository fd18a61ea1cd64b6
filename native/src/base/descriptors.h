// How many of the process's descriptors connections may take.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <cstddef>

namespace p2pkv {

// `most`, or an eighth of RLIMIT_NOFILE if that is less: there are a few kinds of connections, and whoever
// shares the process must find descriptors left. Asked anew each time, because the limit may be raised while
// we run.
inline size_t share_of_descriptors(size_t most) {
  constexpr size_t kLeast = 16;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return most;
  return std::clamp<size_t>(limit.rlim_cur / 8, std::min(kLeast, most), most);
}

}  // namespace p2pkv
