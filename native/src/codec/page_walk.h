// The bytes of a page that lies in pieces, from one end to the other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codec/packed.h"

namespace p2pkv::codec {

// Walks over the pieces of a page, from a place in it.
class Walk {
 public:
  Walk(const Bytes& page, uint64_t skip) : page_(page) {
    while (at_ < page_.n_pieces && skip >= left()) {
      skip -= left();
      ++at_;
    }
    offset_ = skip;
  }

  // The next bytes, where they lie if they lie together; else null, and `gather` or `scatter` takes them.
  uint8_t* together(size_t nbytes) {
    while (at_ < page_.n_pieces && left() == 0) next_piece();
    if (at_ == page_.n_pieces || left() < nbytes) return nullptr;
    uint8_t* const bytes = here();
    offset_ += nbytes;
    return bytes;
  }
  void gather(uint8_t* to, size_t nbytes) {
    each(nbytes, [&](uint8_t* bytes, size_t n) {
      std::memcpy(to, bytes, n);
      to += n;
    });
  }
  void scatter(const uint8_t* from, size_t nbytes) {
    each(nbytes, [&](uint8_t* bytes, size_t n) {
      std::memcpy(bytes, from, n);
      from += n;
    });
  }

 private:
  uint64_t left() const { return static_cast<uint64_t>(page_.pieces[at_].nbytes) - offset_; }
  uint8_t* here() const { return reinterpret_cast<uint8_t*>(page_.pieces[at_].address) + offset_; }
  void next_piece() {
    ++at_;
    offset_ = 0;
  }
  template <typename Take>
  void each(size_t nbytes, const Take& take) {
    while (nbytes > 0 && at_ < page_.n_pieces) {
      const auto n = static_cast<size_t>(std::min<uint64_t>(left(), nbytes));
      take(here(), n);
      nbytes -= n;
      offset_ += n;
      if (left() == 0) next_piece();
    }
  }

  Bytes page_;
  size_t at_ = 0;
  uint64_t offset_ = 0;
};

}  // namespace p2pkv::codec
