// What a call does for each of its pages besides copying: checks of its arguments, and the spans of a batched
// read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "p2pkv/location.h"
#include "p2pkv/transport.h"

namespace p2pkv {

// Memory that `register_memory` covers.
struct Registered {
  int64_t address;
  int64_t nbytes;
};

// The first index whose key occurred before, if any.
std::optional<size_t> find_duplicate(const Key* keys, size_t n);

// For each page the index of the registered region that holds all its pieces, or -1; and its length in bytes,
// or -1 if a piece is empty or negative. `regions` is sorted by address and free of overlaps.
void locate_pages(const Piece* pieces, size_t n_pages, size_t n_pieces,
                  const std::vector<Registered>& regions, int32_t* region_of, int64_t* length_of);

// Appends one span and one word a piece for each of `rows`: the page's pieces lie one after another at its
// location. Local offsets count from `base`.
void plan_reads(const Piece* pieces, size_t n_pieces, const Location* locations,
                const std::vector<int64_t>& rows, int64_t base, Span* spans, Word* words);

}  // namespace p2pkv
