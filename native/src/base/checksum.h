// The checksum of a page's bytes: one for pool, wire and disk. docs/checksum.md defines it and has a worked
// example.
//
// CRC32C in four interleaved lanes, because the CRC instruction takes three cycles but a new one can start in
// each: four lanes hide that, and the page is summed at the speed at which it arrives from memory. The lanes
// and the length are mixed into 64 bits. It finds damage and mix-ups; it is no defence against somebody who
// forges bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace p2pkv {

struct CopyKernel;

// Which code computes the lanes. All give the same values.
enum class ChecksumPath {
  kBest,      // the CPU's CRC32C instructions where it has them (SSE4.2, ARMv8)
  kPortable,  // tables
};

// Sums a page piece by piece: any number of `update` calls of any lengths, then `finish`.
class Checksum {
 public:
  explicit Checksum(ChecksumPath path = ChecksumPath::kBest);

  void update(const void* data, size_t nbytes);
  // The checksum of the bytes so far; more may follow.
  uint64_t finish() const;

  // Sums 32-byte groups, one word to each lane. The lanes are 64 bits wide because the CRC instructions'
  // operands are.
  using Lanes = std::array<uint64_t, 4>;
  using Kernel = void (*)(Lanes& lanes, const uint8_t* data, size_t n_groups);

 private:
  friend void copy_and_checksum_by(const CopyKernel& kernel, void* to, const void* from, size_t nbytes,
                                   Checksum& sum);

  void add_word(const uint8_t* word);

  Kernel kernel_;
  Lanes lanes_;
  uint64_t length_ = 0;
  // The `length_ % 8` bytes that wait for the rest of their word.
  std::array<uint8_t, 8> partial_{};
};

// The checksum of one run of bytes.
uint64_t checksum(const void* data, size_t nbytes);

// Copies like `copy_bytes` and sums the bytes on their way. The regions must not overlap; `from` must not
// change meanwhile, or the checksum may be of other bytes than those that arrived.
void copy_and_checksum(void* to, const void* from, size_t nbytes, Checksum& sum);
// Does the same with this kernel of base/copy_kernels.h, whichever is chosen.
void copy_and_checksum_by(const CopyKernel& kernel, void* to, const void* from, size_t nbytes, Checksum& sum);

}  // namespace p2pkv
