// Keys of pages and where pages lie: the C++ side of p2pkv/page.py.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace p2pkv {

// A hashed page key: 16 bytes of BLAKE2b.
struct Key {
  uint8_t bytes[16];

  friend bool operator==(const Key& a, const Key& b) {
    return std::memcmp(a.bytes, b.bytes, sizeof a.bytes) == 0;
  }
};
static_assert(sizeof(Key) == 16 && std::is_trivially_copyable_v<Key>);

// The first 8 bytes: BLAKE2b has mixed them already, so any of their bits may index a table.
inline uint64_t hash_of(const Key& key) {
  uint64_t hash;
  std::memcpy(&hash, key.bytes, sizeof hash);
  return hash;
}

struct KeyHash {
  size_t operator()(const Key& key) const { return static_cast<size_t>(hash_of(key)); }
};

// Flags of a location; page/packed_location.h has more. The page is in the owner's pool:
constexpr uint32_t kResident = 1;
// its owner has a disk tier, and is asked for the page when it is not in the pool any more.
constexpr uint32_t kHasDisk = 2;

// Mirrors LOCATION in p2pkv/page.py, field by field; little-endian on the wire.
struct Location {
  uint64_t owner;        // node key: the first 8 bytes of BLAKE2b of the node id
  uint64_t boot;         // boot epoch of the owner
  uint64_t offset;       // of the page in the owner's region
  uint64_t length;       // of the page
  uint64_t word_offset;  // of the page's generation word in the owner's region
  uint64_t generation;   // what that word holds; see page/packed_location.h
  uint64_t checksum;
  uint32_t region;
  uint32_t flags;
};
static_assert(sizeof(Location) == 64 && std::is_trivially_copyable_v<Location>);

// Stands for a location where it is only asked whether somebody has the same.
inline uint64_t mark_of(const Location& location) {
  uint64_t words[sizeof(Location) / sizeof(uint64_t)];
  std::memcpy(words, &location, sizeof location);
  uint64_t mark = 0;
  for (const uint64_t word : words) {
    mark = (mark ^ word) * 0x9e3779b97f4a7c15;
    mark ^= mark >> 32;
  }
  return mark;
}

// A stretch of local memory: one piece of a page. Mirrors a row of the (n, p, 2) int64 array.
struct Piece {
  int64_t address;
  int64_t nbytes;
};

}  // namespace p2pkv
