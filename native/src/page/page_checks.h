// What every call checks of its pages before it does anything with them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <vector>

#include "page/location.h"

namespace p2pkv {

// Memory that `register_memory` covers.
struct Registered {
  int64_t address;
  int64_t nbytes;
};

// Whether all of these bytes lie in it.
constexpr bool holds(const Registered& memory, int64_t address, int64_t nbytes) {
  if (address < memory.address) return false;
  const int64_t offset = address - memory.address;
  return offset <= memory.nbytes && nbytes <= memory.nbytes - offset;
}

// The one of `memories` that all of these bytes lie in, or the end. They are sorted by address and free of
// overlaps; `extent_of` says where one lies.
template <typename Memories, typename ExtentOf>
auto find_holder(const Memories& memories, int64_t address, int64_t nbytes, const ExtentOf& extent_of) {
  const auto after = std::upper_bound(
      memories.begin(), memories.end(), address,
      [&](int64_t sought, const auto& memory) { return sought < extent_of(memory).address; });
  if (after == memories.begin()) return memories.end();
  const auto holder = std::prev(after);
  return holds(extent_of(*holder), address, nbytes) ? holder : memories.end();
}

// The first index whose key occurred before, if any.
std::optional<size_t> find_duplicate(const Key* keys, size_t n);

// For each piece the index of the registered region that holds it, or -1; for each page its length in bytes,
// or -1 if a piece is empty or negative. `regions` is sorted by address and free of overlaps. False if there
// is a -1.
bool locate_pieces(const Piece* pieces, size_t n_pages, size_t n_pieces,
                   const std::vector<Registered>& regions, int32_t* region_of, int64_t* length_of);

}  // namespace p2pkv
