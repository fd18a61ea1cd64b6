#include "base/checksum.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/copy_choice.h"
#include "base/copy_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#endif

namespace p2pkv {
namespace {

constexpr size_t kWord = 8;
constexpr size_t kGroup = 4 * kWord;

// Summed, then copied while it is still in the first-level cache. A guess; 2 KiB and 4 KiB measure alike.
constexpr size_t kBlock = 4096;

// The lanes start apart, so that equal words in different lanes, or swapped ones, leave different sums.
// The first digits of the fractions of sqrt(2), sqrt(3), sqrt(5) and sqrt(7).
constexpr Checksum::Lanes kStart = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a};

// CRC32C, bit-reversed as the instructions have it.
constexpr uint32_t kPolynomial = 0x82f63b78;

// tables[k][b]: what byte b does to the sum when k more bytes of the word follow it.
using Tables = std::array<std::array<uint32_t, 256>, kWord>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t sum = byte;
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ ((sum & 1) ? kPolynomial : 0);
    tables[0][byte] = sum;
  }
  for (size_t k = 1; k < kWord; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

uint64_t load_little_endian(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
  return word;
}

uint64_t crc_word_portable(uint64_t lane, uint64_t word) {
  word ^= lane;
  uint32_t sum = 0;
  for (size_t k = 0; k < kWord; ++k) sum ^= kTables[kWord - 1 - k][(word >> (8 * k)) & 0xff];
  return sum;
}

void sum_portable(Checksum::Lanes& lanes, const uint8_t* data, size_t n_groups) {
  for (size_t i = 0; i < 4 * n_groups; ++i) {
    lanes[i & 3] = crc_word_portable(lanes[i & 3], load_little_endian(data + i * kWord));
  }
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) void sum_hardware(Checksum::Lanes& lanes, const uint8_t* data,
                                                    size_t n_groups) {
  uint64_t a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3];
  for (size_t i = 0; i < n_groups; ++i, data += kGroup) {
    a = _mm_crc32_u64(a, load_little_endian(data));
    b = _mm_crc32_u64(b, load_little_endian(data + 8));
    c = _mm_crc32_u64(c, load_little_endian(data + 16));
    d = _mm_crc32_u64(d, load_little_endian(data + 24));
  }
  lanes = {a, b, c, d};
}

bool has_crc_instruction() {
  return __builtin_cpu_supports("sse4.2");
}
#elif defined(__aarch64__)
__attribute__((target("+crc"))) void sum_hardware(Checksum::Lanes& lanes, const uint8_t* data,
                                                  size_t n_groups) {
  uint32_t a = static_cast<uint32_t>(lanes[0]), b = static_cast<uint32_t>(lanes[1]);
  uint32_t c = static_cast<uint32_t>(lanes[2]), d = static_cast<uint32_t>(lanes[3]);
  for (size_t i = 0; i < n_groups; ++i, data += kGroup) {
    a = __crc32cd(a, load_little_endian(data));
    b = __crc32cd(b, load_little_endian(data + 8));
    c = __crc32cd(c, load_little_endian(data + 16));
    d = __crc32cd(d, load_little_endian(data + 24));
  }
  lanes = {a, b, c, d};
}

bool has_crc_instruction() {
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}
#else
constexpr Checksum::Kernel sum_hardware = sum_portable;

bool has_crc_instruction() {
  return false;
}
#endif

Checksum::Kernel best_kernel() {
  static const Checksum::Kernel kernel = has_crc_instruction() ? sum_hardware : sum_portable;
  return kernel;
}

// The finaliser of splitmix64: a bijection in which every bit of the input moves half of the output.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

Checksum::Checksum(ChecksumPath path)
    : kernel_(path == ChecksumPath::kPortable ? sum_portable : best_kernel()), lanes_(kStart) {}

void Checksum::add_word(const uint8_t* word) {
  // Called before `length_` counts the word: its number in the stream picks the lane.
  uint64_t& lane = lanes_[(length_ / kWord) & 3];
  lane = crc_word_portable(lane, load_little_endian(word));
}

void Checksum::update(const void* data, size_t nbytes) {
  const auto* from = static_cast<const uint8_t*>(data);
  while (nbytes > 0) {
    const size_t filled = length_ % kWord;
    if (filled == 0 && length_ % kGroup == 0 && nbytes >= kGroup) {
      const size_t n_groups = nbytes / kGroup;
      kernel_(lanes_, from, n_groups);
      from += n_groups * kGroup, nbytes -= n_groups * kGroup, length_ += n_groups * kGroup;
      continue;
    }
    const size_t taken = std::min(kWord - filled, nbytes);
    std::memcpy(partial_.data() + filled, from, taken);
    if (filled + taken == kWord) {
      length_ -= filled;
      add_word(partial_.data());
      length_ += kWord;
    } else {
      length_ += taken;
    }
    from += taken, nbytes -= taken;
  }
}

uint64_t Checksum::finish() const {
  Checksum last = *this;
  if (const size_t filled = length_ % kWord; filled != 0) {
    std::fill(last.partial_.begin() + filled, last.partial_.end(), uint8_t{0});
    last.length_ -= filled;
    last.add_word(last.partial_.data());
  }
  const uint64_t low = last.lanes_[0] | last.lanes_[1] << 32;
  const uint64_t high = last.lanes_[2] | last.lanes_[3] << 32;
  return mix(mix(mix(length_ + 0x9e3779b97f4a7c15) ^ low) ^ high);
}

uint64_t checksum(const void* data, size_t nbytes) {
  Checksum sum;
  sum.update(data, nbytes);
  return sum.finish();
}

void copy_and_checksum_by(const CopyKernel& kernel, void* to, const void* from, size_t nbytes,
                          Checksum& sum) {
  auto* out = static_cast<uint8_t*>(to);
  const auto* in = static_cast<const uint8_t*>(from);
  const size_t misaligned = sum.length_ % kGroup;
  size_t done = misaligned == 0 ? 0 : std::min(kGroup - misaligned, nbytes);
  sum.update(in, done);
  std::memcpy(out, in, done);
  // A page starts at a multiple of 64 in the pool, so its groups are aligned there wherever its pieces are
  // cut.
  const bool is_aligned = reinterpret_cast<uintptr_t>(out + done) % kGroup == 0;
  if (kernel.copy_and_sum != nullptr && is_aligned && sum.kernel_ == sum_hardware) {
    const size_t n_groups = (nbytes - done) / kGroup;
    kernel.copy_and_sum(sum.lanes_, out + done, in + done, n_groups);
    sum.length_ += n_groups * kGroup;
    done += n_groups * kGroup;
  }
  while (done < nbytes) {
    const size_t block = std::min(kBlock, nbytes - done);
    sum.update(in + done, block);
    // memcpy itself, and not the kernel that is exempt from the thread sanitizer: nobody writes this source
    if (kernel.name == library_kernel().name) {
      std::memcpy(out + done, in + done, block);
    } else {
      kernel.copy(out + done, in + done, block);
    }
    done += block;
  }
}

void copy_and_checksum(void* to, const void* from, size_t nbytes, Checksum& sum) {
  copy_and_checksum_by(kernel_for(Copying::kSummed, nbytes), to, from, nbytes, sum);
}

}  // namespace p2pkv
