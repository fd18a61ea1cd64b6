#include "p2pkv/page_plan.h"

#include <algorithm>
#include <bit>

namespace p2pkv {

std::optional<size_t> find_duplicate(const Key* keys, size_t n) {
  // Open addressing over indexes, at most half full; slot 0 means empty.
  std::vector<uint32_t> table(std::bit_ceil(std::max<size_t>(16, n * 2)), 0);
  const size_t mask = table.size() - 1;
  for (size_t i = 0; i < n; ++i) {
    size_t slot = hash_of(keys[i]) & mask;
    for (; table[slot] != 0; slot = (slot + 1) & mask) {
      if (keys[table[slot] - 1] == keys[i]) return i;
    }
    table[slot] = static_cast<uint32_t>(i + 1);
  }
  return std::nullopt;
}

namespace {

int32_t region_index(const Piece& piece, const std::vector<Registered>& regions) {
  const auto after =
      std::upper_bound(regions.begin(), regions.end(), piece.address,
                       [](int64_t address, const Registered& region) { return address < region.address; });
  if (after == regions.begin()) return -1;
  const Registered& region = *(after - 1);
  const int64_t offset = piece.address - region.address;
  if (offset > region.nbytes || piece.nbytes > region.nbytes - offset) return -1;
  return static_cast<int32_t>(after - 1 - regions.begin());
}

}  // namespace

void locate_pages(const Piece* pieces, size_t n_pages, size_t n_pieces,
                  const std::vector<Registered>& regions, int32_t* region_of, int64_t* length_of) {
  for (size_t page = 0; page < n_pages; ++page) {
    const Piece* own = pieces + page * n_pieces;
    int64_t length = 0;
    int32_t region = -1;
    for (size_t i = 0; i < n_pieces; ++i) {
      if (own[i].nbytes <= 0 || __builtin_add_overflow(length, own[i].nbytes, &length)) {
        length = -1;
        break;
      }
      const int32_t index = region_index(own[i], regions);
      region = i == 0 || index == region ? index : -1;
      if (region < 0) break;
    }
    region_of[page] = region;
    length_of[page] = length;
  }
}

void plan_reads(const Piece* pieces, size_t n_pieces, const Location* locations,
                const std::vector<int64_t>& rows, int64_t base, Span* spans, Word* words) {
  size_t out = 0;
  for (const int64_t row : rows) {
    const Location& location = locations[row];
    auto remote = static_cast<int64_t>(location.offset);
    for (size_t i = 0; i < n_pieces; ++i, ++out) {
      const Piece& piece = pieces[static_cast<size_t>(row) * n_pieces + i];
      spans[out] = {piece.address - base, remote, piece.nbytes};
      words[out] = {location.word_offset, location.generation};
      remote += piece.nbytes;
    }
  }
}

}  // namespace p2pkv
