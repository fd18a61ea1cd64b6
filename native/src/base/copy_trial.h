// How fast the kernels of base/copy_kernels.h copy what is in no cache: pages rarely are when they are
// fetched or published.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "base/copy_kernels.h"

namespace p2pkv {

// Bytes of one copy that are chosen for together, and a size that stands for them.
struct SizeClass {
  std::string_view name;
  size_t most;
  size_t sample;
  size_t n_samples;  // copies that are timed together, so that the clock costs nothing
};
inline constexpr SizeClass kSizeClasses[] = {
    {"below 16 KiB", 16 * 1024 - 1, 8 * 1024, 8},
    {"16 to 256 KiB", 256 * 1024, 64 * 1024, 4},
    {"above 256 KiB", std::numeric_limits<size_t>::max(), 512 * 1024, 1},
};

struct Trial {
  Copying copying;
  const SizeClass* sizes;
  const CopyKernel* kernel;
  double of_memcpy;         // its speed, memcpy's being 1: the median of what it was in each round
  double bytes_per_second;  // of its median round
};

// Lets every kernel copy in turn, round after round, until the budget is spent; at least some rounds, however
// long they take. With fewer than 16 MiB the memory is its own, which takes some more milliseconds.
std::vector<Trial> try_copy_kernels(uint8_t* memory, size_t nbytes, std::chrono::microseconds budget);

}  // namespace p2pkv
