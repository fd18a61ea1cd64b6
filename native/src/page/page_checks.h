// What every call checks of its pages before it does anything with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "page/location.h"

namespace p2pkv {

// Memory that `register_memory` covers.
struct Registered {
  int64_t address;
  int64_t nbytes;
};

// The first index whose key occurred before, if any.
std::optional<size_t> find_duplicate(const Key* keys, size_t n);

// For each piece the index of the registered region that holds it, or -1; for each page its length in bytes,
// or -1 if a piece is empty or negative. `regions` is sorted by address and free of overlaps. False if there
// is a -1.
bool locate_pieces(const Piece* pieces, size_t n_pages, size_t n_pieces,
                   const std::vector<Registered>& regions, int32_t* region_of, int64_t* length_of);

}  // namespace p2pkv
