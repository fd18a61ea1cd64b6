// BLAKE2b of several short messages at once, a lane of a vector register each: RFC 7693's compression
// function F on the only, and so final, block of each.
//
// libsodium takes 130 to 250 ns a key, one key at a time, and a fetch of 128 pages may cost 33 us in all. A
// key and its prefix nearly always fit into one block.
#pragma once

#include <cstddef>
#include <cstdint>

#include "page/location.h"

namespace p2pkv {

constexpr size_t kHashBlockBytes = 128;

// One message a lane, zero-padded to a block.
template <size_t kLanes>
struct HashLanes {
  alignas(64) uint8_t blocks[kLanes][kHashBlockBytes];
  alignas(64) uint64_t lengths[kLanes];
};

#if defined(__x86_64__)
// Each asks for the instructions of its name.
void hash_lanes_avx2(const HashLanes<4>& lanes, Key* const* keys);
void hash_lanes_avx512(const HashLanes<8>& lanes, Key* const* keys);
#endif

}  // namespace p2pkv
