// Blocks of 16-bit floating point values, split into what can't be made smaller and what can: sign and
// mantissa as they are, exponents as codes of 4 or 3 bits. docs/codec.md has the bytes.
//
// Every kernel gives and takes the same bytes; which one runs depends on the CPU only. None reads or writes a
// byte outside of what it is given, whatever the bytes are, and each turns any packed bytes into some values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace p2pkv::codec {

constexpr size_t kBlockBytes = 4096;
constexpr size_t kBlockValues = kBlockBytes / 2;

// How the values of a block are laid out. On the wire and on disk.
enum class Layout : uint8_t {
  kRaw = 0,   // nothing is known of it: the bytes as they are
  kBf16 = 1,  // sign, 8 bits of exponent, 7 of mantissa
  kFp16 = 2,  // sign, 5 bits of exponent, 10 of mantissa
};
constexpr size_t kLayouts = 3;

// Bytes of a block that is packed, without its escapes.
constexpr size_t packed_block_bytes(Layout layout) {
  return layout == Layout::kRaw    ? kBlockBytes
         : layout == Layout::kBf16 ? kBlockValues + kBlockValues / 2
                                   : kBlockValues + kBlockValues / 2 + kBlockValues / 4;
}

// The exponents that have codes: `base` and those above it, 15 of bf16 and 7 of fp16, and 0.
struct Window {
  uint8_t base = 0;
  size_t n_escapes = 0;  // values of other exponents
};

struct BlockKernel {
  std::string_view name;
  // The window below the largest exponent in the block that a number has, or, if that leaves many out, below
  // those that most have.
  Window (*measure[kLayouts])(const uint8_t* block);
  // Writes `packed_block_bytes`, and to `is_escape`, of kBlockValues, 1 for each value that has no code.
  void (*pack[kLayouts])(const uint8_t* block, uint8_t base, uint8_t* to, uint8_t* is_escape);
  // Writes kBlockBytes; escapes are to be put in their places afterwards.
  void (*unpack[kLayouts])(const uint8_t* from, uint8_t base, uint8_t* block);
};

// All that run on this CPU, the portable one first and the best one last.
const std::vector<BlockKernel>& block_kernels();

// The processor's own, in block_kernels_x86.cc.
std::vector<BlockKernel> processor_block_kernels();

}  // namespace p2pkv::codec
