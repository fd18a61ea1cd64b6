// What a pool says of a page beside its bytes, in shared memory: a record a granule, for a successor, and for
// the host's engines.
//
// A page's record is written before its word turns even, and not again while it is even, but for `use`. So
// the word proves the record as it proves the bytes: whoever loads it, then reads the record, then loads it
// once more, and finds the same even value both times, has read what was said of that page.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/checksum.h"
#include "page/location.h"
#include "page/packed_location.h"

namespace p2pkv {

struct PageRecord {
  Key key;
  uint64_t length;
  uint32_t packed;  // in units of kPackedUnit
  uint32_t n_granules;
  uint64_t checksum;
  uint64_t generation;
  uint64_t sum;  // of all before, and of the granule
  uint64_t use;  // when it was used, times two, and 1 if it is a guest: one store, whatever moment it is

  uint64_t make_sum(uint32_t granule) const {
    return p2pkv::checksum(this, offsetof(PageRecord, sum)) ^ (granule + 1) * uint64_t{0x9e3779b97f4a7c15};
  }
  bool is_guest() const { return (use & 1) != 0; }
  // Bytes that the page takes in the pool.
  uint64_t stored_nbytes() const {
    return packed != 0 ? uint64_t{packed} * kPackedUnit : std::max<uint64_t>(length, 1);
  }
};
static_assert(sizeof(PageRecord) == 64, "a record should be one cache line");

// Where the records of a pool begin in their memory.
constexpr size_t kRecordsOffset = 64 << 10;

constexpr size_t records_nbytes(uint32_t n_granules) {
  return kRecordsOffset + size_t{n_granules} * sizeof(PageRecord);
}

}  // namespace p2pkv
