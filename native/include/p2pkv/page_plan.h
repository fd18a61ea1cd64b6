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

// For each piece the index of the registered region that holds it, or -1; for each page its length in bytes,
// or -1 if a piece is empty or negative. `regions` is sorted by address and free of overlaps.
void locate_pieces(const Piece* pieces, size_t n_pages, size_t n_pieces,
                   const std::vector<Registered>& regions, int32_t* region_of, int64_t* length_of);

// The reads that bring some pages' pieces into one local region.
struct ReadPlan {
  std::vector<Span> spans;
  std::vector<Word> words;       // one a span
  std::vector<int64_t> indexes;  // of each span's piece, counted over the pieces of `rows`
};

// Plans those pieces of the pages `rows` that lie in `region`; local offsets count from its `base`. A page's
// pieces lie one after another at its location.
ReadPlan plan_reads(const Piece* pieces, const int32_t* region_of, size_t n_pieces, const Location* locations,
                    const std::vector<int64_t>& rows, int32_t region, int64_t base);

}  // namespace p2pkv
