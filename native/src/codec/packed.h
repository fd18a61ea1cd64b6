// The packed form of a page: its bytes made smaller without loss, as they lie in a pool, go over the wire and
// are kept on disk. docs/codec.md has the bytes.
//
// Nothing here allocates but a table a thread, once. What is read need not be a packed page: any bytes may be
// given, and none outside of what is given is read or written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/checksum.h"
#include "codec/block_kernels.h"
#include "page/packed_location.h"

namespace p2pkv::codec {

// Packed forms are whole numbers of it.
constexpr uint64_t kUnit = kPackedUnit;

// A page's bytes: pieces, one after another.
struct Bytes {
  const Piece* pieces;
  size_t n_pieces;

  uint64_t nbytes() const;
};

// How a block is kept: an entry of the packed form's table.
struct Block {
  Layout layout;
  uint8_t base;
  uint16_t n_escapes;
};
static_assert(sizeof(Block) == 4);

// The blocks of a page of so many bytes.
uint64_t n_blocks(uint64_t length);

// What a page takes when it is packed.
struct Size {
  uint64_t nbytes = 0;           // 0: no less than as it is
  uint64_t payload = 0;          // of blocks
  const Block* table = nullptr;  // the plan of every block
};

// Looks at a few blocks, and if these become smaller by a sixteenth at least, at every byte. Plans the page's
// blocks in `table`, which has room for them and outlives the size.
Size measure(const Bytes& page, Block* table);
// Writes the packed form of `size`, and adds the page's own bytes to `sum`. False if they changed since they
// were measured, so that nothing of use was written. A store after it is seen no earlier than these bytes.
bool pack(const Bytes& page, const Size& size, uint8_t* to, Checksum* sum);

// Writes the page that `nbytes` bytes hold into its pieces. False if they hold none of this length: then the
// pieces hold anything.
bool unpack(const uint8_t* from, uint64_t nbytes, const Bytes& page, Checksum* sum = nullptr);
// Does the same with bytes that others may write to meanwhile: whatever they are, and however they change, no
// others are read or written. What was made of them counts only once it is proven that they did not change;
// all loads are done when a `load_fence` after it is.
bool unpack_shared(const uint8_t* from, uint64_t nbytes, const Bytes& page);
// Unpacks a page of which the packed form lies in the last `nbytes` of its own pieces.
bool unpack_in_place(const Bytes& page, uint64_t nbytes);
// The checksum of the page of `length` bytes that is packed here; false if none is.
bool checksum_packed(const uint8_t* from, uint64_t nbytes, uint64_t length, uint64_t* checksum);

// Of block_kernels.h, the one that is used.
std::string_view kernel_name();

}  // namespace p2pkv::codec
