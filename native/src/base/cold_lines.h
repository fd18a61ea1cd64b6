// Whole cache lines that are stored past the cache, one at a time.
#pragma once

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace p2pkv {

constexpr size_t kCacheLine = 64;

// `to` is aligned to a line.
inline void store_line(uint8_t* to, const uint8_t* from) {
#if defined(__x86_64__)
  for (size_t i = 0; i < kCacheLine; i += sizeof(__m128i)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
#elif defined(__aarch64__)
  __asm__ volatile(
      "ldp q0, q1, [%1]\n\t"
      "ldp q2, q3, [%1, #32]\n\t"
      "stnp q0, q1, [%0]\n\t"
      "stnp q2, q3, [%0, #32]"
      :
      : "r"(to), "r"(from)
      : "v0", "v1", "v2", "v3", "memory");
#else
  std::memcpy(to, from, kCacheLine);
#endif
}

// Keeps what is stored afterwards behind all lines.
inline void fence_lines() {
#if defined(__x86_64__)
  _mm_sfence();
#elif defined(__aarch64__)
  __asm__ volatile("dmb ishst" ::: "memory");
#endif
}

}  // namespace p2pkv
