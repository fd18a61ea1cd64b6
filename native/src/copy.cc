#include "p2pkv/copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__SANITIZE_THREAD__)
#define P2PKV_TSAN 1
#endif

namespace p2pkv {
namespace {

// Below this the destination is likely read soon and fits the cache; above, non-temporal stores save reading
// it in. Measured on Zen 5 with cold sources: equal at 16 KiB, 1.2x at 64 KiB, 1.5x at 1 MiB.
constexpr size_t kNonTemporalFrom = 32 * 1024;

#if defined(P2PKV_TSAN)
__attribute__((no_sanitize("thread"), noinline)) void racy_copy(void* to, const void* from, size_t nbytes) {
  auto* out = static_cast<volatile unsigned char*>(to);
  const auto* in = static_cast<const volatile unsigned char*>(from);
  for (size_t i = 0; i < nbytes; ++i) out[i] = in[i];
}
#else
void racy_copy(void* to, const void* from, size_t nbytes) {
  std::memcpy(to, from, nbytes);
}
#endif

#if defined(__x86_64__) && !defined(P2PKV_TSAN)
__attribute__((target("avx2"))) void copy_non_temporal(uint8_t* to, const uint8_t* from, size_t nbytes) {
  // Non-temporal stores fault on unaligned destinations: head and tail go separately.
  const size_t head = (64 - (reinterpret_cast<uintptr_t>(to) & 63)) & 63;
  std::memcpy(to, from, head);
  to += head, from += head, nbytes -= head;
  const size_t body = nbytes & ~size_t{127};
  for (size_t i = 0; i < body; i += 128) {
    _mm_prefetch(reinterpret_cast<const char*>(from + i + 1024), _MM_HINT_NTA);
    _mm_prefetch(reinterpret_cast<const char*>(from + i + 1088), _MM_HINT_NTA);
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
    const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 64));
    const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 96));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 32), b);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 64), c);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 96), d);
  }
  std::memcpy(to + body, from + body, nbytes - body);
  _mm_sfence();
}
#endif

}  // namespace

void copy_bytes(void* to, const void* from, size_t nbytes) {
#if defined(__x86_64__) && !defined(P2PKV_TSAN)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2 && nbytes >= kNonTemporalFrom) {
    copy_non_temporal(static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), nbytes);
    return;
  }
#endif
  racy_copy(to, from, nbytes);
}

}  // namespace p2pkv
