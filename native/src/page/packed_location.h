// Locations of pages that lie in their owner's pool in their packed form (codec/packed.h).
//
// `length` is the page's, whatever it takes there. The bits of `flags` above kPackedShift hold how many bytes
// the packed form has, in units of kPackedUnit; 0: the page lies there as it is. The generation of a packed
// page is what its word holds and 1: no word of a committed page is odd, so a reader that does not know of
// packed pages can't prove any of it, and misses.
#pragma once

#include <algorithm>
#include <cstdint>

#include "page/location.h"
#include "page/words.h"

namespace p2pkv {

constexpr uint32_t kPackedShift = 4;
constexpr uint64_t kPackedUnit = 64;

// Bytes of the packed form; 0: there is none.
constexpr uint64_t packed_nbytes(const Location& location) {
  return uint64_t{location.flags >> kPackedShift} * kPackedUnit;
}

// Bytes that the page takes in the owner's region.
constexpr uint64_t stored_nbytes(const Location& location) {
  const uint64_t packed = packed_nbytes(location);
  return packed != 0 ? packed : location.length;
}

// What the page's generation word holds while the page is there. Off the wire, it may be odd: then it proves
// nothing.
constexpr uint64_t word_value(const Location& location) {
  return packed_nbytes(location) != 0 ? location.generation ^ 1 : location.generation;
}

// Whether a read from there can be validated. Locations come off the wire: without a word it can't, an odd
// one is that of a free block, and a packed page is shorter than the page.
constexpr bool can_prove(const Location& location) {
  return location.word_offset != kNoWord && word_value(location) % 2 == 0 &&
         packed_nbytes(location) < std::max<uint64_t>(location.length, 1);
}

}  // namespace p2pkv
