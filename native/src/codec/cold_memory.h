// Blocks out of memory that no cache has, and into it, as the copies of base/copy_kernels.h move it: a block
// is far too short for the processor to see by itself that the next one follows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/cold_lines.h"
#include "base/copy_choice.h"
#include "codec/block_kernels.h"

namespace p2pkv::codec {

constexpr size_t kLine = kCacheLine;
// How far behind the next block loads begin. Measured beside 0 and 3072 (Zen 4, 1 MiB, unpacking): 13 to 15
// GB/s, 10 to 15 and 10 to 11; 7.5 without. Packing, which sums its pages as well, gains nothing by it.
constexpr size_t kAheadOfNext = 1024;

// Has the block that begins here on its way when the one before is done with. May go beyond its memory's end.
inline void fetch_ahead(const uint8_t* next, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i += kLine) __builtin_prefetch(next + kAheadOfNext + i, 0, 3);
}

// Whether a page of so many bytes is better stored past the cache: the chosen copy does, or does not.
inline bool is_stored_past_cache(uint64_t nbytes) {
  return stores_past_cache(kernel_for(Copying::kPlain, static_cast<size_t>(nbytes)));
}

// A block, wherever it goes; what is not in whole lines there goes through the cache.
inline void store_block(uint8_t* to, const uint8_t* from, size_t nbytes) {
  size_t done = std::min(-reinterpret_cast<uintptr_t>(to) % kLine, nbytes);
  std::memcpy(to, from, done);
  for (; nbytes - done >= kLine; done += kLine) store_line(to + done, from + done);
  std::memcpy(to + done, from + done, nbytes - done);
}

// Runs of bytes to one place after another, each at most a block: either made where they go, or made aside
// and stored past the cache in whole lines. `finish` before anybody is told of them.
class Writer {
 public:
  Writer(uint8_t* to, bool is_past_cache) : to_(to), is_past_cache_(is_past_cache) {
    if (!is_past_cache) return;
    begin_ = n_ = reinterpret_cast<uintptr_t>(to) % kLine;
    to_ -= n_;
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  // Where the next run is to be made.
  uint8_t* room() { return is_past_cache_ ? aside_ + n_ : to_; }
  // It has so many bytes.
  void made(size_t nbytes) {
    if (!is_past_cache_) {
      to_ += nbytes;
      return;
    }
    n_ += nbytes;
    size_t done = 0;
    for (; n_ - done >= kLine; done += kLine) {
      if (begin_ > 0) {
        std::memcpy(to_ + begin_, aside_ + begin_, kLine - begin_);
        begin_ = 0;
      } else {
        store_line(to_ + done, aside_ + done);
      }
    }
    std::memmove(aside_, aside_ + done, n_ - done);
    to_ += done;
    n_ -= done;
  }
  void finish() {
    if (!is_past_cache_) return;
    std::memcpy(to_ + begin_, aside_ + begin_, n_ - begin_);
    to_ += n_;
    fence_lines();
  }

 private:
  uint8_t* to_;  // of the first byte aside, or where the next run goes
  const bool is_past_cache_;
  size_t n_ = 0;      // bytes aside
  size_t begin_ = 0;  // of which so many, in front, are not ours
  alignas(kLine) uint8_t aside_[kLine + kBlockBytes];
};

}  // namespace p2pkv::codec
