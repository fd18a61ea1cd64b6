// Which stretches of a file or a buffer are free: best fit, neighbours merged.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace p2pkv::disk {

// `by_offset_` and `by_size_` hold the same free stretches, none of which touch. Not thread-safe.
class Extents {
 public:
  static constexpr uint64_t kNone = ~uint64_t{0};

  explicit Extents(uint64_t nbytes) {
    if (nbytes > 0) insert(0, nbytes);
  }

  // Offset of a stretch of this size, kNone when there is none. The smallest that fits is cut: equal pages
  // then fill each other's holes exactly.
  uint64_t allocate(uint64_t nbytes) {
    const auto best = by_size_.lower_bound({nbytes, 0});
    if (best == by_size_.end()) return kNone;
    const auto [size, offset] = *best;
    erase(offset, size);
    if (size > nbytes) insert(offset + nbytes, size - nbytes);
    return offset;
  }

  // Takes this very stretch; false if not all of it is free.
  bool take(uint64_t offset, uint64_t nbytes) {
    auto after = by_offset_.upper_bound(offset);
    if (after == by_offset_.begin()) return false;
    const auto [start, size] = *std::prev(after);
    if (start + size < offset + nbytes) return false;
    erase(start, size);
    if (start < offset) insert(start, offset - start);
    if (start + size > offset + nbytes) insert(offset + nbytes, start + size - offset - nbytes);
    return true;
  }

  void free(uint64_t offset, uint64_t nbytes) {
    auto after = by_offset_.lower_bound(offset);
    if (after != by_offset_.end() && after->first == offset + nbytes) {
      const auto [start, size] = *after;
      erase(start, size);
      nbytes += size;
    }
    after = by_offset_.lower_bound(offset);
    if (after != by_offset_.begin()) {
      const auto [start, size] = *std::prev(after);
      if (start + size == offset) {
        erase(start, size);
        offset = start;
        nbytes += size;
      }
    }
    insert(offset, nbytes);
  }

  uint64_t n_free() const { return n_free_; }
  uint64_t largest() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }

 private:
  void insert(uint64_t offset, uint64_t nbytes) {
    by_offset_.emplace(offset, nbytes);
    by_size_.emplace(nbytes, offset);
    n_free_ += nbytes;
  }
  void erase(uint64_t offset, uint64_t nbytes) {
    by_offset_.erase(offset);
    by_size_.erase({nbytes, offset});
    n_free_ -= nbytes;
  }

  std::map<uint64_t, uint64_t> by_offset_;
  std::set<std::pair<uint64_t, uint64_t>> by_size_;
  uint64_t n_free_ = 0;
};

}  // namespace p2pkv::disk
