#include "page/key_hash.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/zmq_api.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace p2pkv {
namespace {

constexpr size_t kBlockBytes = 128;

void hash_with_library(std::string_view prefix, std::string_view text, Key* key) {
  std::string message;
  message.reserve(prefix.size() + text.size());
  message.append(prefix).append(text);
  ZmqApi::get().generichash(key->bytes, sizeof *key, reinterpret_cast<const unsigned char*>(message.data()),
                            message.size(), nullptr, 0);
}

#if defined(__x86_64__)

// libsodium takes 130 to 250 ns a key, one key at a time, and a fetch of 128 pages may cost 33 us in all. A
// key and its prefix nearly always fit into one block, so four of them go through the compression function
// side by side, a lane each: 40 ns a key.
constexpr size_t kLanes = 4;

constexpr uint64_t kInitial[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                                  0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                                  0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

constexpr uint8_t kSigma[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

// One message a lane, zero-padded to a block.
struct Lanes {
  alignas(32) uint8_t blocks[kLanes][kBlockBytes];
  alignas(32) uint64_t lengths[kLanes];
};

#define P2PKV_AVX2 __attribute__((target("avx2")))

P2PKV_AVX2 inline __m256i rotate_right_32(__m256i x) {
  return _mm256_shuffle_epi32(x, _MM_SHUFFLE(2, 3, 0, 1));
}
P2PKV_AVX2 inline __m256i rotate_right_24(__m256i x) {
  const __m256i order = _mm256_setr_epi8(3, 4, 5, 6, 7, 0, 1, 2, 11, 12, 13, 14, 15, 8, 9, 10, 3, 4, 5, 6, 7,
                                         0, 1, 2, 11, 12, 13, 14, 15, 8, 9, 10);
  return _mm256_shuffle_epi8(x, order);
}
P2PKV_AVX2 inline __m256i rotate_right_16(__m256i x) {
  const __m256i order = _mm256_setr_epi8(2, 3, 4, 5, 6, 7, 0, 1, 10, 11, 12, 13, 14, 15, 8, 9, 2, 3, 4, 5, 6,
                                         7, 0, 1, 10, 11, 12, 13, 14, 15, 8, 9);
  return _mm256_shuffle_epi8(x, order);
}
P2PKV_AVX2 inline __m256i rotate_right_63(__m256i x) {
  return _mm256_or_si256(_mm256_srli_epi64(x, 63), _mm256_add_epi64(x, x));
}

// The mixing function G of RFC 7693, on all lanes.
P2PKV_AVX2 inline void mix(__m256i* v, int a, int b, int c, int d, __m256i x, __m256i y) {
  v[a] = _mm256_add_epi64(_mm256_add_epi64(v[a], v[b]), x);
  v[d] = rotate_right_32(_mm256_xor_si256(v[d], v[a]));
  v[c] = _mm256_add_epi64(v[c], v[d]);
  v[b] = rotate_right_24(_mm256_xor_si256(v[b], v[c]));
  v[a] = _mm256_add_epi64(_mm256_add_epi64(v[a], v[b]), y);
  v[d] = rotate_right_16(_mm256_xor_si256(v[d], v[a]));
  v[c] = _mm256_add_epi64(v[c], v[d]);
  v[b] = rotate_right_63(_mm256_xor_si256(v[b], v[c]));
}

// The compression function F of RFC 7693 on the only, and so final, block of each lane.
P2PKV_AVX2 void hash_lanes(const Lanes& lanes, Key* const* keys) {
  __m256i m[16];
  for (int i = 0; i < 16; ++i) {
    std::array<uint64_t, kLanes> words;
    for (size_t lane = 0; lane < kLanes; ++lane) std::memcpy(&words[lane], lanes.blocks[lane] + 8 * i, 8);
    m[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words.data()));
  }
  // The parameter block: digest length, no key, fan-out and depth of 1.
  const uint64_t first = kInitial[0] ^ 0x01010000 ^ sizeof(Key);
  __m256i v[16];
  for (int i = 0; i < 8; ++i) {
    v[i] = _mm256_set1_epi64x(static_cast<int64_t>(i == 0 ? first : kInitial[i]));
    v[i + 8] = _mm256_set1_epi64x(static_cast<int64_t>(kInitial[i]));
  }
  v[12] = _mm256_xor_si256(v[12], _mm256_load_si256(reinterpret_cast<const __m256i*>(lanes.lengths)));
  v[14] = _mm256_xor_si256(v[14], _mm256_set1_epi64x(-1));
  for (const auto& s : kSigma) {
    mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
    mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
    mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
    mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
    mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
    mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
    mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
    mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
  }
  for (int i = 0; i < 2; ++i) {
    alignas(32) std::array<uint64_t, kLanes> out;
    const __m256i start = _mm256_set1_epi64x(static_cast<int64_t>(i == 0 ? first : kInitial[i]));
    const __m256i word = _mm256_xor_si256(start, _mm256_xor_si256(v[i], v[i + 8]));
    _mm256_store_si256(reinterpret_cast<__m256i*>(out.data()), word);
    for (size_t lane = 0; lane < kLanes; ++lane) std::memcpy(keys[lane]->bytes + 8 * i, &out[lane], 8);
  }
}

void hash_by_lanes(std::string_view prefix, const std::string_view* texts, size_t n, Key* keys) {
  Lanes lanes;
  std::array<Key*, kLanes> targets;
  Key unused;
  size_t n_filled = 0;
  const auto flush = [&] {
    for (size_t lane = n_filled; lane < kLanes; ++lane) {
      targets[lane] = &unused;
      std::memset(lanes.blocks[lane], 0, kBlockBytes);
      lanes.lengths[lane] = 0;
    }
    hash_lanes(lanes, targets.data());
    n_filled = 0;
  };
  for (size_t i = 0; i < n; ++i) {
    const size_t nbytes = prefix.size() + texts[i].size();
    if (nbytes > kBlockBytes) {
      hash_with_library(prefix, texts[i], &keys[i]);
      continue;
    }
    uint8_t* block = lanes.blocks[n_filled];
    std::memcpy(block, prefix.data(), prefix.size());
    if (!texts[i].empty()) std::memcpy(block + prefix.size(), texts[i].data(), texts[i].size());
    std::memset(block + nbytes, 0, kBlockBytes - nbytes);
    lanes.lengths[n_filled] = nbytes;
    targets[n_filled] = &keys[i];
    if (++n_filled == kLanes) flush();
  }
  if (n_filled > 0) flush();
}

#endif

}  // namespace

bool hash_keys(std::string_view prefix, const std::string_view* texts, size_t n, Key* keys, HashPath path) {
  if (ZmqApi::get().generichash == nullptr) return false;
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (path == HashPath::kBest && has_avx2) {
    hash_by_lanes(prefix, texts, n, keys);
    return true;
  }
#endif
  for (size_t i = 0; i < n; ++i) hash_with_library(prefix, texts[i], &keys[i]);
  return true;
}

}  // namespace p2pkv
