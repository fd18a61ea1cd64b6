#include "page/page_checks.h"

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
  const auto holder =
      find_holder(regions, piece.address, piece.nbytes, [](const Registered& region) { return region; });
  return holder == regions.end() ? -1 : static_cast<int32_t>(holder - regions.begin());
}

}  // namespace

bool locate_pieces(const Piece* pieces, size_t n_pages, size_t n_pieces,
                   const std::vector<Registered>& regions, int32_t* region_of, int64_t* length_of) {
  bool is_good = true;
  for (size_t page = 0; page < n_pages; ++page) {
    int64_t length = 0;
    for (size_t i = page * n_pieces; i < (page + 1) * n_pieces; ++i) {
      const int64_t nbytes = pieces[i].nbytes;
      if (nbytes <= 0 || length < 0 || __builtin_add_overflow(length, nbytes, &length)) length = -1;
      region_of[i] = region_index(pieces[i], regions);
      is_good = is_good && region_of[i] >= 0 && length > 0;
    }
    length_of[page] = length;
  }
  return is_good;
}

}  // namespace p2pkv
