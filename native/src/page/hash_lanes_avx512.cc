// BLAKE2b of eight messages at once, for processors with AVX-512.
#if defined(__x86_64__)

#include <immintrin.h>

#define P2PKV_HASH_ISA avx512
#define P2PKV_HASH_TARGET __attribute__((target("avx512f")))

namespace p2pkv::avx512 {
namespace {

using Vector = __m512i;

P2PKV_HASH_TARGET inline Vector add(Vector a, Vector b) {
  return _mm512_add_epi64(a, b);
}
P2PKV_HASH_TARGET inline Vector exclusive_or(Vector a, Vector b) {
  return _mm512_xor_si512(a, b);
}
template <typename>
P2PKV_HASH_TARGET inline Vector all_lanes(unsigned long long word) {
  return _mm512_set1_epi64(static_cast<long long>(word));
}
template <int kBits>
P2PKV_HASH_TARGET inline Vector rotate_right(Vector x) {
  return _mm512_maskz_ror_epi64(0xff, x, kBits);  // all lanes: GCC 12 warns of the one without a mask
}

}  // namespace
}  // namespace p2pkv::avx512

#include "page/hash_lanes_body.h"

namespace p2pkv {

P2PKV_HASH_TARGET void hash_lanes_avx512(const HashLanes<8>& lanes, Key* const* keys) {
  avx512::hash_lanes<avx512::Vector>(lanes, keys);
}

}  // namespace p2pkv

#undef P2PKV_HASH_TARGET
#undef P2PKV_HASH_ISA

#endif
