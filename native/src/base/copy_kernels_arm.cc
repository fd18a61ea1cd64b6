// Copies by NEON pairs that are stored past the cache (`stnp`), which compilers have no common word for.
#include "base/copy_kernels.h"

#if defined(__aarch64__)

namespace p2pkv {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kQuarters = 4 * kLine;
constexpr size_t kAhead = 1024;  // a guess; not tuned
constexpr size_t kNoPrefetch = 0;

inline void move_line(uint8_t* to, const uint8_t* from) {
  __asm__ volatile(
      "ldp q0, q1, [%1]\n\t"
      "ldp q2, q3, [%1, #32]\n\t"
      "stnp q0, q1, [%0]\n\t"
      "stnp q2, q3, [%0, #32]"
      :
      : "r"(to), "r"(from)
      : "v0", "v1", "v2", "v3", "memory");
}

// Keeps what is stored afterwards behind the bytes stored past the cache.
inline void fence() {
  __asm__ volatile("dmb ishst" ::: "memory");
}

template <size_t kPrefetch>
void run_neon(uint8_t* to, const uint8_t* from, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i += kLine) {
    if constexpr (kPrefetch != kNoPrefetch) __builtin_prefetch(from + i + kPrefetch, 0, 0);
    move_line(to + i, from + i);
  }
  fence();
}

void quarters_neon(uint8_t* to, const uint8_t* from, size_t nbytes) {
  const size_t quarter = nbytes / 4;
  for (size_t i = 0; i < quarter; i += kLine) {
    for (size_t k = 0; k < 4; ++k) move_line(to + k * quarter + i, from + k * quarter + i);
  }
  fence();
}

}  // namespace

std::vector<CopyKernel> processor_kernels() {
  return {{"neon_nt", copy_in_blocks<run_neon<kNoPrefetch>, kLine>},
          {"neon_nt_prefetch", copy_in_blocks<run_neon<kAhead>, kLine>},
          {"neon_nt_interleaved", copy_in_blocks<quarters_neon, kQuarters>}};
}

}  // namespace p2pkv

#endif
