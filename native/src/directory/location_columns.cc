#include "directory/location_columns.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

namespace p2pkv {
namespace {

constexpr size_t kWords = sizeof(Location) / sizeof(uint64_t);
constexpr size_t kColumnHead = 1 + sizeof(uint64_t);

using Words = std::array<uint64_t, kWords>;
static_assert(sizeof(Words) == sizeof(Location));

size_t bytes_for(uint64_t value) {
  return (static_cast<size_t>(std::bit_width(value)) + 7) / 8;
}

// The value of the first `width` bytes. A whole word is read where there is one: a copy of a length that the
// compiler does not know takes several times longer.
uint64_t value_of(std::string_view bytes, size_t width) {
  uint64_t value = 0;
  if (bytes.size() < sizeof value) {
    std::memcpy(&value, bytes.data(), width);
    return value;
  }
  std::memcpy(&value, bytes.data(), sizeof value);
  return width == sizeof value ? value : value & ((uint64_t{1} << (8 * width)) - 1);
}

}  // namespace

void append_columns(const std::vector<Location>& locations, std::string* out) {
  if (locations.empty()) return;
  const size_t n = locations.size();
  std::vector<Words> rows(n);
  std::memcpy(rows.data(), locations.data(), n * sizeof(Location));
  Words least = rows[0];
  Words greatest = rows[0];
  for (const Words& row : rows) {
    for (size_t word = 0; word < kWords; ++word) {
      least[word] = std::min(least[word], row[word]);
      greatest[word] = std::max(greatest[word], row[word]);
    }
  }
  // Each value is written as a whole word, and what is too much of it is written over by the next.
  const size_t at = out->size();
  out->resize(at + kWords * (kColumnHead + n * sizeof(uint64_t)) + sizeof(uint64_t));
  char* to = out->data() + at;
  for (size_t word = 0; word < kWords; ++word) {
    const size_t width = bytes_for(greatest[word] - least[word]);
    *to++ = static_cast<char>(width);
    std::memcpy(to, &least[word], sizeof(uint64_t));
    to += sizeof(uint64_t);
    for (const Words& row : rows) {
      const uint64_t excess = row[word] - least[word];
      std::memcpy(to, &excess, sizeof excess);
      to += width;
    }
  }
  out->resize(static_cast<size_t>(to - out->data()));
}

bool take_columns(std::string_view bytes, size_t n, std::vector<Location>* locations) {
  if (n == 0) return bytes.empty();
  std::vector<Words> rows(n);
  for (size_t word = 0; word < kWords; ++word) {
    if (bytes.size() < kColumnHead) return false;
    const size_t width = static_cast<uint8_t>(bytes[0]);
    uint64_t least;
    std::memcpy(&least, bytes.data() + 1, sizeof least);
    bytes.remove_prefix(kColumnHead);
    if (width > sizeof(uint64_t) || bytes.size() / n < width) return false;
    for (Words& row : rows) {
      row[word] = least + value_of(bytes, width);
      bytes.remove_prefix(width);
    }
  }
  if (!bytes.empty()) return false;
  locations->resize(n);
  std::memcpy(static_cast<void*>(locations->data()), rows.data(), n * sizeof(Location));
  return true;
}

}  // namespace p2pkv
