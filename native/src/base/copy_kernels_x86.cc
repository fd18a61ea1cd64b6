// Copies by AVX2 and AVX-512, whose instructions are used only where the CPU has them, and by `rep movsb`.
//
// Which is ahead depends on the CPU: a non-temporal store saves reading the destination in, but costs a fence
// and, on some, bandwidth; a prefetch is ahead of the hardware's on some and in its way on others; streams at
// four places at once keep more misses under way than one does.
#include "base/copy_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

namespace p2pkv {
namespace {

enum class Stores { kTemporal, kNonTemporal };

// How far ahead the source is fetched. Beside non-temporal stores 2 KiB is the best of 0.5, 1, 2 and 4 KiB,
// or within the noise of it (Zen 5, 8 KiB to 1 MiB); beside others it is a guess.
constexpr size_t kAheadOfStreams = 2048;
constexpr size_t kAhead = 1024;
constexpr size_t kNoPrefetch = 0;

constexpr size_t kRun = 128;          // bytes of a step of one stream
constexpr size_t kQuarters = 4 * 64;  // bytes of a step of four
constexpr size_t kSummed = 32;        // bytes that the checksum takes at once
constexpr size_t kVector = 32;        // bytes of an AVX2 register
constexpr size_t kWideVector = 64;    // bytes of an AVX-512 register

template <Stores kStores>
inline void prefetch(const uint8_t* at) {
  constexpr _mm_hint kHint = kStores == Stores::kNonTemporal ? _MM_HINT_NTA : _MM_HINT_T0;
  _mm_prefetch(reinterpret_cast<const char*>(at), kHint);
}

template <Stores kStores>
inline void fence() {
  if constexpr (kStores == Stores::kNonTemporal) _mm_sfence();
}

uint64_t load_word_of_sum(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

void copy_rep_movsb(void* to, const void* from, size_t nbytes) {
  __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(nbytes)::"memory");
}

// --- AVX2

template <Stores kStores>
__attribute__((target("avx2"), always_inline)) inline void move_vector(uint8_t* to, const uint8_t* from) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  if constexpr (kStores == Stores::kNonTemporal) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bytes);
  } else {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), bytes);
  }
}

template <Stores kStores, size_t kPrefetch>
__attribute__((target("avx2"))) void run_avx2(uint8_t* to, const uint8_t* from, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i += kRun) {
    if constexpr (kPrefetch != kNoPrefetch) {
      prefetch<kStores>(from + i + kPrefetch);
      prefetch<kStores>(from + i + kPrefetch + 64);
    }
#pragma GCC unroll 4
    for (size_t k = 0; k < kRun; k += kVector) move_vector<kStores>(to + i + k, from + i + k);
  }
  fence<kStores>();
}

template <Stores kStores>
__attribute__((target("avx2"))) void quarters_avx2(uint8_t* to, const uint8_t* from, size_t nbytes) {
  const size_t quarter = nbytes / 4;
  for (size_t i = 0; i < quarter; i += 64) {
#pragma GCC unroll 4
    for (size_t k = 0; k < 4; ++k) {
      move_vector<kStores>(to + k * quarter + i, from + k * quarter + i);
      move_vector<kStores>(to + k * quarter + i + kVector, from + k * quarter + i + kVector);
    }
  }
  fence<kStores>();
}

template <Stores kStores, size_t kPrefetch>
__attribute__((target("avx2,sse4.2"))) void sum_avx2(Checksum::Lanes& lanes, uint8_t* to, const uint8_t* from,
                                                     size_t n_groups) {
  uint64_t a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3];
  for (size_t i = 0; i < n_groups; ++i, from += kSummed, to += kSummed) {
    prefetch<kStores>(from + kPrefetch);
    a = _mm_crc32_u64(a, load_word_of_sum(from));
    b = _mm_crc32_u64(b, load_word_of_sum(from + 8));
    c = _mm_crc32_u64(c, load_word_of_sum(from + 16));
    d = _mm_crc32_u64(d, load_word_of_sum(from + 24));
    move_vector<kStores>(to, from);
  }
  lanes = {a, b, c, d};
  fence<kStores>();
}

// --- AVX-512

template <Stores kStores>
__attribute__((target("avx512f"), always_inline)) inline void move_wide(uint8_t* to, const uint8_t* from) {
  const __m512i bytes = _mm512_loadu_si512(from);
  if constexpr (kStores == Stores::kNonTemporal) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bytes);
  } else {
    _mm512_store_si512(to, bytes);
  }
}

template <Stores kStores, size_t kPrefetch>
__attribute__((target("avx512f"))) void run_avx512(uint8_t* to, const uint8_t* from, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i += kRun) {
    if constexpr (kPrefetch != kNoPrefetch) {
      prefetch<kStores>(from + i + kPrefetch);
      prefetch<kStores>(from + i + kPrefetch + 64);
    }
#pragma GCC unroll 2
    for (size_t k = 0; k < kRun; k += kWideVector) move_wide<kStores>(to + i + k, from + i + k);
  }
  fence<kStores>();
}

template <Stores kStores>
__attribute__((target("avx512f"))) void quarters_avx512(uint8_t* to, const uint8_t* from, size_t nbytes) {
  const size_t quarter = nbytes / 4;
  for (size_t i = 0; i < quarter; i += 64) {
#pragma GCC unroll 4
    for (size_t k = 0; k < 4; ++k) move_wide<kStores>(to + k * quarter + i, from + k * quarter + i);
  }
  fence<kStores>();
}

template <void (*kBody)(uint8_t*, const uint8_t*, size_t), size_t kBlock>
constexpr CopyKernel kernel(std::string_view name, CopyKernel::CopyAndSum copy_and_sum = nullptr) {
  return {name, copy_in_blocks<kBody, kBlock>, copy_and_sum};
}

}  // namespace

std::vector<CopyKernel> processor_kernels() {
  constexpr Stores kNt = Stores::kNonTemporal, kPlain = Stores::kTemporal;
  std::vector<CopyKernel> kernels{{"rep_movsb", copy_rep_movsb}};
  const bool has_crc = __builtin_cpu_supports("sse4.2");
  const auto if_summed = [&](CopyKernel::CopyAndSum sum) { return has_crc ? sum : nullptr; };
  if (__builtin_cpu_supports("avx2")) {
    kernels.push_back(kernel<run_avx2<kPlain, kNoPrefetch>, kRun>("avx2"));
    kernels.push_back(
        kernel<run_avx2<kPlain, kAhead>, kRun>("avx2_prefetch", if_summed(sum_avx2<kPlain, kAhead>)));
    kernels.push_back(kernel<quarters_avx2<kPlain>, kQuarters>("avx2_interleaved"));
    kernels.push_back(kernel<run_avx2<kNt, kNoPrefetch>, kRun>("avx2_nt"));
    kernels.push_back(kernel<run_avx2<kNt, kAheadOfStreams>, kRun>(
        "avx2_nt_prefetch", if_summed(sum_avx2<kNt, kAheadOfStreams>)));
    kernels.push_back(kernel<quarters_avx2<kNt>, kQuarters>("avx2_nt_interleaved"));
  }
  if (__builtin_cpu_supports("avx512f")) {
    kernels.push_back(kernel<run_avx512<kPlain, kNoPrefetch>, kRun>("avx512"));
    kernels.push_back(kernel<run_avx512<kPlain, kAhead>, kRun>("avx512_prefetch"));
    kernels.push_back(kernel<quarters_avx512<kPlain>, kQuarters>("avx512_interleaved"));
    kernels.push_back(kernel<run_avx512<kNt, kNoPrefetch>, kRun>("avx512_nt"));
    kernels.push_back(kernel<run_avx512<kNt, kAheadOfStreams>, kRun>("avx512_nt_prefetch"));
    kernels.push_back(kernel<quarters_avx512<kNt>, kQuarters>("avx512_nt_interleaved"));
  }
  return kernels;
}

}  // namespace p2pkv

#endif
