// Arithmetic on numbers that came off a wire or a disk. Such numbers may be anything: whatever is computed
// from them to find, or to make room for, bytes is computed here, where a sum that wraps is seen.
#pragma once

#include <cstdint>
#include <optional>

namespace p2pkv {

// Nothing if it wraps.
constexpr std::optional<uint64_t> checked_sum(uint64_t a, uint64_t b) {
  uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

// `nbytes` rounded up to a multiple of `alignment`; nothing if that wraps.
constexpr std::optional<uint64_t> checked_padded(uint64_t nbytes, uint64_t alignment) {
  const auto up = checked_sum(nbytes, alignment - 1);
  if (!up) return std::nullopt;
  return *up / alignment * alignment;
}

// Whether `length` bytes from `offset` on are among `nbytes`. Compared as room left, which can't wrap.
constexpr bool lies_within(uint64_t offset, uint64_t length, uint64_t nbytes) {
  return length <= nbytes && offset <= nbytes - length;
}

// Says whether an aligned 64-bit word at `offset` lies within `nbytes`.
constexpr bool word_lies_within(uint64_t offset, uint64_t nbytes) {
  return offset % 8 == 0 && lies_within(offset, 8, nbytes);
}

}  // namespace p2pkv
