// The loops of block_kernels.h, written so that compilers make vectors of them for whatever CPU they are
// compiled for: no step depends on another, and halves and quarters of a block share a byte, not neighbours.
#pragma once

#include <algorithm>
#include <cstdint>

#include "codec/block_kernels.h"

namespace p2pkv::codec {

#define P2PKV_LOOP __attribute__((always_inline)) inline

// Lies at any address.
struct __attribute__((packed, may_alias)) Value {
  uint16_t bits;
};

struct Bf16 {
  static constexpr Layout kLayout = Layout::kBf16;
  static constexpr unsigned kExponentBits = 8, kCodes = 15;
};
struct Fp16 {
  static constexpr Layout kLayout = Layout::kFp16;
  static constexpr unsigned kExponentBits = 5, kCodes = 7;
};

constexpr size_t kFewEscapes = kBlockValues / 16;
constexpr size_t kSample = 64;

template <typename Format>
constexpr uint16_t kMost = (1u << Format::kExponentBits) - 1;  // of infinities and NaNs

template <typename Format>
P2PKV_LOOP uint16_t exponent_of(uint16_t value) {
  return static_cast<uint16_t>(value >> (15 - Format::kExponentBits)) & kMost<Format>;
}

// 1 if the exponent has no code. The code of 0 is the one behind the window's.
template <typename Format>
P2PKV_LOOP uint16_t is_escaped(uint16_t exponent, uint16_t base) {
  const auto above = static_cast<uint16_t>(exponent - base);
  return static_cast<uint16_t>((above >= Format::kCodes) & (exponent != 0));
}

template <typename Format>
P2PKV_LOOP uint16_t code_of(uint16_t exponent, uint16_t base) {
  const auto above = static_cast<uint16_t>(exponent - base);
  return std::min<uint16_t>(above, Format::kCodes);
}

// The window whose last code is that of `largest`.
template <typename Format>
P2PKV_LOOP Window window_below(const Value* values, uint16_t largest) {
  // above 0, which has a code of its own
  const auto base = static_cast<uint16_t>(largest > Format::kCodes ? largest - Format::kCodes + 1 : 1);
  uint16_t n_escapes = 0;
  for (size_t i = 0; i < kBlockValues; ++i) {
    const uint16_t exponent = exponent_of<Format>(values[i].bits);
    n_escapes = static_cast<uint16_t>(n_escapes + is_escaped<Format>(exponent, base));
  }
  return {static_cast<uint8_t>(base), n_escapes};
}

template <typename Format>
P2PKV_LOOP Window measure_loop(const uint8_t* block) {
  const auto* values = reinterpret_cast<const Value*>(block);
  uint16_t largest = 0;  // and 1 more: so what is no number counts as nothing
  for (size_t i = 0; i < kBlockValues; ++i) {
    const uint16_t next = static_cast<uint16_t>(exponent_of<Format>(values[i].bits) + 1) & kMost<Format>;
    largest = next > largest ? next : largest;
  }
  const Window window =
      window_below<Format>(values, largest > 0 ? static_cast<uint16_t>(largest - 1) : largest);
  if (window.n_escapes <= kFewEscapes) return window;
  // A few values are far above the others. Most of a sample are not.
  uint16_t sample[kSample];
  for (size_t i = 0; i < kSample; ++i)
    sample[i] = exponent_of<Format>(values[i * (kBlockValues / kSample + 1) % kBlockValues].bits);
  std::nth_element(sample, sample + kSample * 7 / 8, sample + kSample);
  const Window other =
      window_below<Format>(values, static_cast<uint16_t>(sample[kSample * 7 / 8] + 1) & kMost<Format>);
  return other.n_escapes < window.n_escapes ? other : window;
}

P2PKV_LOOP void pack_bf16_loop(const uint8_t* block, uint8_t base, uint8_t* __restrict to,
                               uint8_t* __restrict is_escape) {
  constexpr size_t kHalf = kBlockValues / 2;
  const auto* values = reinterpret_cast<const Value*>(block);
  uint8_t* const codes = to + kBlockValues;
  for (size_t i = 0; i < kHalf; ++i) {
    const uint16_t a = values[i].bits, b = values[i + kHalf].bits;
    to[i] = static_cast<uint8_t>((a >> 8 & 0x80) | (a & 0x7f));
    to[i + kHalf] = static_cast<uint8_t>((b >> 8 & 0x80) | (b & 0x7f));
    const uint16_t of_a = exponent_of<Bf16>(a), of_b = exponent_of<Bf16>(b);
    is_escape[i] = static_cast<uint8_t>(is_escaped<Bf16>(of_a, base));
    is_escape[i + kHalf] = static_cast<uint8_t>(is_escaped<Bf16>(of_b, base));
    codes[i] = static_cast<uint8_t>(code_of<Bf16>(of_a, base) | code_of<Bf16>(of_b, base) << 4);
  }
}

P2PKV_LOOP uint16_t unpacked_bf16(uint16_t rest, uint16_t code, uint16_t base) {
  const auto exponent = static_cast<uint16_t>(code == Bf16::kCodes ? 0 : (code + base) & 0xff);
  return static_cast<uint16_t>((rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f));
}

P2PKV_LOOP void unpack_bf16_loop(const uint8_t* __restrict from, uint8_t base, uint8_t* __restrict block) {
  constexpr size_t kHalf = kBlockValues / 2;
  auto* values = reinterpret_cast<Value*>(block);
  const uint8_t* const codes = from + kBlockValues;
  for (size_t i = 0; i < kHalf; ++i) values[i].bits = unpacked_bf16(from[i], codes[i] & 0xf, base);
  for (size_t i = 0; i < kHalf; ++i)
    values[i + kHalf].bits = unpacked_bf16(from[i + kHalf], codes[i] >> 4, base);
}

// Sign, the mantissa's two upper bits, and the code: what an fp16 value has beside its low byte.
P2PKV_LOOP uint16_t upper_bits(uint16_t value, uint16_t base) {
  const uint16_t code = code_of<Fp16>(exponent_of<Fp16>(value), base);
  return static_cast<uint16_t>((value >> 10 & 0x20) | (value >> 5 & 0x18) | code);
}

P2PKV_LOOP void pack_fp16_loop(const uint8_t* block, uint8_t base, uint8_t* __restrict to,
                               uint8_t* __restrict is_escape) {
  constexpr size_t kQuarter = kBlockValues / 4;
  const auto* values = reinterpret_cast<const Value*>(block);
  uint8_t* const fours = to + kBlockValues;
  uint8_t* const twos = fours + kBlockValues / 2;
  for (size_t i = 0; i < kBlockValues; ++i) {
    to[i] = static_cast<uint8_t>(values[i].bits);
    is_escape[i] = static_cast<uint8_t>(is_escaped<Fp16>(exponent_of<Fp16>(values[i].bits), base));
  }
  for (size_t i = 0; i < kQuarter; ++i) {
    const uint16_t a = upper_bits(values[i].bits, base), b = upper_bits(values[i + kQuarter].bits, base);
    const uint16_t c = upper_bits(values[i + 2 * kQuarter].bits, base);
    const uint16_t d = upper_bits(values[i + 3 * kQuarter].bits, base);
    fours[i] = static_cast<uint8_t>((a & 0xf) | c << 4);
    fours[i + kQuarter] = static_cast<uint8_t>((b & 0xf) | d << 4);
    twos[i] = static_cast<uint8_t>(a >> 4 | (b >> 4) << 2 | (c >> 4) << 4 | (d >> 4) << 6);
  }
}

P2PKV_LOOP uint16_t unpacked_fp16(uint16_t low, uint16_t upper, uint16_t base) {
  const uint16_t code = upper & 7;
  const auto exponent = static_cast<uint16_t>(code == Fp16::kCodes ? 0 : (code + base) & 0x1f);
  return static_cast<uint16_t>((upper & 0x20) << 10 | exponent << 10 | (upper & 0x18) << 5 | low);
}

P2PKV_LOOP void unpack_fp16_loop(const uint8_t* __restrict from, uint8_t base, uint8_t* __restrict block) {
  constexpr size_t kQuarter = kBlockValues / 4;
  auto* values = reinterpret_cast<Value*>(block);
  const uint8_t* const fours = from + kBlockValues;
  const uint8_t* const twos = fours + kBlockValues / 2;
  for (size_t quarter = 0; quarter < 4; ++quarter) {
    const uint8_t* const low = from + quarter * kQuarter;
    const uint8_t* const four = fours + (quarter & 1) * kQuarter;
    const unsigned four_shift = quarter >= 2 ? 4 : 0, two_shift = static_cast<unsigned>(2 * quarter);
    for (size_t i = 0; i < kQuarter; ++i) {
      const auto upper =
          static_cast<uint16_t>((four[i] >> four_shift & 0xf) | (twos[i] >> two_shift & 3) << 4);
      values[quarter * kQuarter + i].bits = unpacked_fp16(low[i], upper, base);
    }
  }
}

}  // namespace p2pkv::codec
