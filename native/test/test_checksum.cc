#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "base/copy_kernels.h"
#include "check.h"

namespace {

using p2pkv::Checksum;
using p2pkv::ChecksumPath;

using Bytes = std::vector<uint8_t>;

Bytes random_bytes(std::mt19937& random, size_t nbytes) {
  Bytes bytes(nbytes);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

uint64_t sum(const Bytes& bytes, ChecksumPath path) {
  Checksum checksum(path);
  checksum.update(bytes.data(), bytes.size());
  return checksum.finish();
}

Bytes of_string(const std::string& text) {
  return Bytes(text.begin(), text.end());
}

Bytes counting(size_t n) {
  Bytes bytes(n);
  for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<uint8_t>(i);
  return bytes;
}

TEST(checksum_gives_the_documented_values_on_every_path) {
  Bytes squares(10000);
  for (size_t i = 0; i < squares.size(); ++i) squares[i] = static_cast<uint8_t>(i * i % 251);
  for (const ChecksumPath path : {ChecksumPath::kBest, ChecksumPath::kPortable}) {
    CHECK_EQ(sum({}, path), 0x5b582abea01fb9e9u);
    CHECK_EQ(sum(of_string("a"), path), 0x02f15c6f86e72a9au);
    CHECK_EQ(sum(of_string("12345678"), path), 0xcf81a09ab0080677u);
    CHECK_EQ(sum(of_string("p2pkv page"), path), 0x5cade159899fb531u);
    CHECK_EQ(sum(counting(32), path), 0xe31c4d7117623699u);
    CHECK_EQ(sum(counting(77), path), 0x381c824374169989u);
    CHECK_EQ(sum(squares, path), 0xf188c6fd47b69e3fu);
  }
}

TEST(checksum_is_the_same_however_the_bytes_are_cut) {
  const uint32_t seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    const Bytes bytes = random_bytes(random, random() % 3000);
    const uint64_t whole = sum(bytes, ChecksumPath::kPortable);
    for (const ChecksumPath path : {ChecksumPath::kBest, ChecksumPath::kPortable}) {
      Checksum checksum(path);
      for (size_t done = 0; done < bytes.size();) {
        const size_t piece = std::min<size_t>(random() % 200, bytes.size() - done);
        checksum.update(bytes.data() + done, piece);
        checksum.finish();  // must not disturb what follows
        done += piece;
      }
      CHECK_EQ(checksum.finish(), whole);
    }
  }
}

TEST(checksum_sees_every_flipped_bit_every_swap_and_the_length) {
  Bytes bytes = counting(100);
  const uint64_t right = sum(bytes, ChecksumPath::kBest);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    CHECK(sum(bytes, ChecksumPath::kBest) != right);
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
  }
  for (size_t word = 0; word + 1 < bytes.size() / 8; ++word) {
    Bytes swapped = bytes;
    std::swap_ranges(swapped.begin() + 8 * word, swapped.begin() + 8 * word + 8,
                     swapped.begin() + 8 * word + 8);
    CHECK(sum(swapped, ChecksumPath::kBest) != right);
  }
  Bytes zeros(8, 0);
  const uint64_t of_eight = sum(zeros, ChecksumPath::kBest);
  zeros.pop_back();
  CHECK(sum(zeros, ChecksumPath::kBest) != of_eight);
}

TEST(checksum_of_a_copy_is_that_of_the_bytes_and_the_copy_is_right_by_every_kernel) {
  const uint32_t seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  for (size_t round = 0; round < 120; ++round) {
    const Bytes bytes = random_bytes(random, 1 + random() % 100000);
    const size_t shift = round % 2 * (random() % 64);  // groups are aligned in every other one
    const p2pkv::CopyKernel& kernel = p2pkv::copy_kernels()[round % p2pkv::copy_kernels().size()];
    Bytes out(bytes.size() + 128, 0xee);
    for (const ChecksumPath path : {ChecksumPath::kBest, ChecksumPath::kPortable}) {
      std::fill(out.begin(), out.end(), uint8_t{0xee});
      Checksum checksum(path);
      for (size_t done = 0; done < bytes.size();) {
        const size_t piece = std::min<size_t>(1 + random() % 60000, bytes.size() - done);
        p2pkv::copy_and_checksum_by(kernel, out.data() + shift + done, bytes.data() + done, piece, checksum);
        done += piece;
      }
      CHECK_EQ(checksum.finish(), sum(bytes, ChecksumPath::kPortable));
      CHECK(std::memcmp(out.data() + shift, bytes.data(), bytes.size()) == 0);
      const auto is_untouched = [](uint8_t byte) { return byte == 0xee; };
      CHECK(std::all_of(out.begin(), out.begin() + shift, is_untouched));
      CHECK(std::all_of(out.begin() + shift + bytes.size(), out.end(), is_untouched));
    }
  }
}

}  // namespace
