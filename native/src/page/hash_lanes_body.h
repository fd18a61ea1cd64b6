// What is the same for every width of registers: included by the file of each, which says before in which
// namespace (P2PKV_HASH_ISA) there is a `Vector` of 64-bit lanes for it, and what functions may use
// (P2PKV_HASH_TARGET). Everything is local to that namespace, and nothing of the standard library is made
// here: code for one processor must not be taken by the linker for another. So it is included more than once
// where the files are compiled as one.
#include <cstdint>
#include <cstring>

#include "page/hash_lanes.h"

namespace p2pkv::P2PKV_HASH_ISA {
namespace {

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

// The mixing function G, on all lanes.
template <typename Vector>
P2PKV_HASH_TARGET inline void mix(Vector* v, int a, int b, int c, int d, Vector x, Vector y) {
  v[a] = add(add(v[a], v[b]), x);
  v[d] = rotate_right<32>(exclusive_or(v[d], v[a]));
  v[c] = add(v[c], v[d]);
  v[b] = rotate_right<24>(exclusive_or(v[b], v[c]));
  v[a] = add(add(v[a], v[b]), y);
  v[d] = rotate_right<16>(exclusive_or(v[d], v[a]));
  v[c] = add(v[c], v[d]);
  v[b] = rotate_right<63>(exclusive_or(v[b], v[c]));
}

template <typename Vector>
P2PKV_HASH_TARGET inline void hash_lanes(const HashLanes<sizeof(Vector) / 8>& lanes, Key* const* keys) {
  constexpr size_t kLanes = sizeof(Vector) / 8;
  // All are stored before the first is loaded: a load of what lies in several stores must wait for these.
  uint64_t words[16][kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 16; ++i) std::memcpy(&words[i][lane], lanes.blocks[lane] + 8 * i, 8);
  }
  Vector m[16];
  std::memcpy(m, words, sizeof m);
  // The parameter block: digest length, no key, fan-out and depth of 1.
  const uint64_t first = kInitial[0] ^ 0x01010000 ^ sizeof(Key);
  Vector v[16];
  for (int i = 0; i < 8; ++i) {
    v[i] = all_lanes<Vector>(i == 0 ? first : kInitial[i]);
    v[i + 8] = all_lanes<Vector>(kInitial[i]);
  }
  Vector lengths;
  std::memcpy(&lengths, lanes.lengths, sizeof lengths);
  v[12] = exclusive_or(v[12], lengths);
  v[14] = exclusive_or(v[14], all_lanes<Vector>(~uint64_t{0}));
  for (const uint8_t* s = kSigma[0]; s != kSigma[0] + sizeof kSigma; s += 16) {
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
    const Vector word =
        exclusive_or(all_lanes<Vector>(i == 0 ? first : kInitial[i]), exclusive_or(v[i], v[i + 8]));
    uint64_t out[kLanes];
    std::memcpy(out, &word, sizeof word);
    for (size_t lane = 0; lane < kLanes; ++lane) std::memcpy(keys[lane]->bytes + 8 * i, &out[lane], 8);
  }
}

}  // namespace
}  // namespace p2pkv::P2PKV_HASH_ISA
