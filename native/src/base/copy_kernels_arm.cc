// Copies by NEON pairs that are stored past the cache (`stnp`), which compilers have no common word for.
#include "base/cold_lines.h"
#include "base/copy_kernels.h"

#if defined(__aarch64__)

namespace p2pkv {
namespace {

constexpr size_t kQuarters = 4 * kCacheLine;
constexpr size_t kAhead = 1024;  // a guess; not tuned
constexpr size_t kNoPrefetch = 0;

template <size_t kPrefetch>
void run_neon(uint8_t* to, const uint8_t* from, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i += kCacheLine) {
    if constexpr (kPrefetch != kNoPrefetch) __builtin_prefetch(from + i + kPrefetch, 0, 0);
    store_line(to + i, from + i);
  }
  fence_lines();
}

void quarters_neon(uint8_t* to, const uint8_t* from, size_t nbytes) {
  const size_t quarter = nbytes / 4;
  for (size_t i = 0; i < quarter; i += kCacheLine) {
    for (size_t k = 0; k < 4; ++k) store_line(to + k * quarter + i, from + k * quarter + i);
  }
  fence_lines();
}

}  // namespace

std::vector<CopyKernel> processor_kernels() {
  return {{"neon_nt", copy_in_blocks<run_neon<kNoPrefetch>, kCacheLine>},
          {"neon_nt_prefetch", copy_in_blocks<run_neon<kAhead>, kCacheLine>},
          {"neon_nt_interleaved", copy_in_blocks<quarters_neon, kQuarters>}};
}

}  // namespace p2pkv

#endif
