// BLAKE2b of four messages at once, for processors with AVX2.
#if defined(__x86_64__)

#include <immintrin.h>

#define P2PKV_HASH_ISA avx2
#define P2PKV_HASH_TARGET __attribute__((target("avx2")))

namespace p2pkv::avx2 {
namespace {

using Vector = __m256i;

P2PKV_HASH_TARGET inline Vector add(Vector a, Vector b) {
  return _mm256_add_epi64(a, b);
}
P2PKV_HASH_TARGET inline Vector exclusive_or(Vector a, Vector b) {
  return _mm256_xor_si256(a, b);
}
template <typename>
P2PKV_HASH_TARGET inline Vector all_lanes(unsigned long long word) {
  return _mm256_set1_epi64x(static_cast<long long>(word));
}

// Whole bytes are moved by one shuffle; there is no instruction that rotates.
template <int kBits>
inline Vector rotate_right(Vector x);
template <>
P2PKV_HASH_TARGET inline Vector rotate_right<32>(Vector x) {
  return _mm256_shuffle_epi32(x, _MM_SHUFFLE(2, 3, 0, 1));
}
template <>
P2PKV_HASH_TARGET inline Vector rotate_right<24>(Vector x) {
  const Vector order = _mm256_setr_epi8(3, 4, 5, 6, 7, 0, 1, 2, 11, 12, 13, 14, 15, 8, 9, 10, 3, 4, 5, 6, 7,
                                        0, 1, 2, 11, 12, 13, 14, 15, 8, 9, 10);
  return _mm256_shuffle_epi8(x, order);
}
template <>
P2PKV_HASH_TARGET inline Vector rotate_right<16>(Vector x) {
  const Vector order = _mm256_setr_epi8(2, 3, 4, 5, 6, 7, 0, 1, 10, 11, 12, 13, 14, 15, 8, 9, 2, 3, 4, 5, 6,
                                        7, 0, 1, 10, 11, 12, 13, 14, 15, 8, 9);
  return _mm256_shuffle_epi8(x, order);
}
template <>
P2PKV_HASH_TARGET inline Vector rotate_right<63>(Vector x) {
  return _mm256_or_si256(_mm256_srli_epi64(x, 63), _mm256_add_epi64(x, x));
}

}  // namespace
}  // namespace p2pkv::avx2

#include "page/hash_lanes_body.h"

namespace p2pkv {

P2PKV_HASH_TARGET void hash_lanes_avx2(const HashLanes<4>& lanes, Key* const* keys) {
  avx2::hash_lanes<avx2::Vector>(lanes, keys);
}

}  // namespace p2pkv

#undef P2PKV_HASH_TARGET
#undef P2PKV_HASH_ISA

#endif
