// Packed pages are the pages that were packed, whatever their values, lengths and pieces; and bytes that are
// none harm nobody.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/copy_choice.h"
#include "base/copy_kernels.h"
#include "check.h"
#include "codec/block_kernels.h"
#include "codec/packed.h"
#include "seed.h"

namespace {

using p2pkv::Checksum;
using p2pkv::Piece;
namespace codec = p2pkv::codec;

using Random = std::mt19937_64;
using Memory = std::vector<uint8_t>;

constexpr uint8_t kUntouched = 0xee;
#if defined(__SANITIZE_THREAD__)
constexpr int kRounds = 40;  // there are no threads here, and each step takes ten times as long
#else
constexpr int kRounds = 400;
#endif

uint16_t as_bf16(float value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
}

// Of numbers between 2^-14 and 2^15.
uint16_t as_fp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const int exponent = static_cast<int>(bits >> 23 & 0xff) - 127 + 15;
  const uint32_t sign = bits >> 16 & 0x8000;
  if (exponent <= 0) return static_cast<uint16_t>(sign);
  return static_cast<uint16_t>(sign | static_cast<uint32_t>(exponent) << 10 | (bits >> 13 & 0x3ff));
}

enum class Kind { kBf16, kFp16, kSpecial, kEscapes, kNoise, kZeros };
constexpr Kind kKinds[] = {Kind::kBf16,    Kind::kFp16,  Kind::kSpecial,
                           Kind::kEscapes, Kind::kNoise, Kind::kZeros};

// A page of such values; `odd` bytes of something else in front shift them.
Memory page_of(Kind kind, size_t nbytes, Random& random) {
  std::normal_distribution<float> normal(0, 1);
  Memory page(nbytes);
  for (size_t i = 0; i + 1 < nbytes; i += 2) {
    uint16_t value = static_cast<uint16_t>(random());
    // of channels that differ in scale, which float16's window is too small for
    const float scale = kind == Kind::kFp16 ? 1 : std::exp(0.5f * static_cast<float>(i / 2 % 7) - 1);
    const float number = normal(random) * scale;
    if (kind == Kind::kBf16) value = as_bf16(number);
    if (kind == Kind::kFp16) value = as_fp16(number);
    if (kind == Kind::kZeros) value = random() % 16 == 0 ? 0x8000 : 0;
    // now and then infinities, NaNs with payloads, denormals, zeros
    if (kind == Kind::kSpecial && random() % 8 != 0) value = as_bf16(number);
    if (kind == Kind::kSpecial && random() % 64 == 0)
      value = static_cast<uint16_t>((random() % 2 ? 0x7f80 : 0) | (value & 0x807f));
    // in each block as many escapes as pay, or one more
    if (kind == Kind::kEscapes) value = random() % 6 != 0 ? 0x3f80 : 0x0080;
    std::memcpy(&page[i], &value, sizeof value);
  }
  return page;
}

// Memory cut into pieces, with bytes between them that nobody may touch.
struct Cut {
  Memory memory;
  std::vector<Piece> pieces;

  Cut(size_t nbytes, size_t n_pieces, Random& random) : memory(nbytes + 64 * n_pieces + 128, kUntouched) {
    // at a line's begin, as pages mostly do, or anywhere
    const size_t to_line = -reinterpret_cast<uintptr_t>(memory.data()) % 64;
    size_t at = random() % 2 ? to_line : 1 + random() % 8;
    size_t left = nbytes;
    for (size_t i = 0; i < n_pieces; ++i) {
      const size_t n =
          i + 1 == n_pieces ? left : std::min<size_t>(left, random() % (2 * nbytes / n_pieces + 1));
      pieces.push_back({reinterpret_cast<int64_t>(memory.data() + at), static_cast<int64_t>(n)});
      at += n + 1 + random() % 32;
      left -= n;
    }
  }
  codec::Bytes bytes() const { return {pieces.data(), pieces.size()}; }
  void put(const Memory& page) {
    size_t at = 0;
    for (const Piece& piece : pieces) {
      std::copy_n(page.begin() + static_cast<ptrdiff_t>(at), piece.nbytes,
                  reinterpret_cast<uint8_t*>(piece.address));
      at += static_cast<size_t>(piece.nbytes);
    }
  }
  Memory get() const {
    Memory page;
    for (const Piece& piece : pieces) {
      const auto* from = reinterpret_cast<const uint8_t*>(piece.address);
      page.insert(page.end(), from, from + piece.nbytes);
    }
    return page;
  }
  // All that is in no piece.
  Memory between() const {
    Memory left = memory;
    for (const Piece& piece : pieces) {
      const auto at = reinterpret_cast<const uint8_t*>(piece.address) - memory.data();
      std::fill_n(left.begin() + at, piece.nbytes, kUntouched);
    }
    return left;
  }
  bool is_exact() const {
    return std::ranges::all_of(between(), [](uint8_t byte) { return byte == kUntouched; });
  }
};

// What a page takes, and the plan of its blocks.
struct Measured {
  std::vector<codec::Block> table;
  codec::Size size;

  explicit Measured(const codec::Bytes& page)
      : table(codec::n_blocks(page.nbytes())), size(codec::measure(page, table.data())) {}
};

Memory pack(const codec::Bytes& page, const codec::Size& size, uint64_t* checksum) {
  Memory packed(size.nbytes + 64, kUntouched);
  Checksum sum;
  CHECK(codec::pack(page, size, packed.data(), &sum));
  *checksum = sum.finish();
  CHECK(std::all_of(packed.end() - 64, packed.end(), [](uint8_t byte) { return byte == kUntouched; }));
  packed.resize(size.nbytes);
  return packed;
}

void check_round_trip(const Memory& page, Random& random) {
  Cut source(page.size(), 1 + random() % 5, random);
  source.put(page);
  const Measured measured(source.bytes());
  const codec::Size& size = measured.size;
  if (size.nbytes == 0) return;
  CHECK(size.nbytes < page.size() && size.nbytes % codec::kUnit == 0);
  uint64_t checksum = 0;
  const Memory packed = pack(source.bytes(), size, &checksum);
  CHECK(source.get() == page);
  CHECK_EQ(checksum, p2pkv::checksum(page.data(), page.size()));

  Cut target(page.size(), 1 + random() % 5, random);
  Checksum sum;
  CHECK(codec::unpack(packed.data(), packed.size(), target.bytes(), &sum));
  CHECK(target.get() == page && target.is_exact());
  CHECK_EQ(sum.finish(), checksum);

  Cut shared(page.size(), 1 + random() % 5, random);
  CHECK(codec::unpack_shared(packed.data(), packed.size(), shared.bytes()));
  CHECK(shared.get() == page && shared.is_exact());

  Cut in_place(page.size(), 1 + random() % 5, random);
  Memory landed(page.size() - packed.size(), 0x55);
  landed.insert(landed.end(), packed.begin(), packed.end());
  in_place.put(landed);
  CHECK(codec::unpack_in_place(in_place.bytes(), packed.size()));
  CHECK(in_place.get() == page && in_place.is_exact());

  uint64_t of_packed = 0;
  CHECK(codec::checksum_packed(packed.data(), packed.size(), page.size(), &of_packed));
  CHECK_EQ(of_packed, checksum);
}

// Copies as the CPU's first kernel that stores past the cache does, where it has one, or as memcpy does.
void choose_copies(bool is_past_cache) {
  const auto& kernels = p2pkv::copy_kernels();
  const auto found = std::ranges::find_if(kernels, p2pkv::stores_past_cache);
  const bool is_there = is_past_cache && found != kernels.end();
  CHECK(p2pkv::use_copy_kernel(is_there ? found->name : p2pkv::library_kernel().name));
}

TEST(codec_round_trips_values_lengths_and_pieces) {
  Random random(p2pkv::test::seed("codec_round_trips"));
  for (int round = 0; round < kRounds; ++round) {
    choose_copies(round % 2 == 0);
    const Kind kind = kKinds[random() % std::size(kKinds)];
    size_t nbytes = 4096 * (random() % 12) + (random() % 3 == 0 ? random() % 4096 : 0);
    Memory page = page_of(kind, std::max<size_t>(nbytes, 1), random);
    if (random() % 4 == 0) page.insert(page.begin(), static_cast<uint8_t>(random()));
    check_round_trip(page, random);
  }
  choose_copies(false);
}

TEST(codec_packs_what_can_be_packed) {
  Random random(p2pkv::test::seed("codec_packs"));
  const struct {
    Kind kind;
    double least, most;
  } expected[] = {{Kind::kBf16, 1.30, 1.34}, {Kind::kZeros, 1.32, 1.34}, {Kind::kFp16, 1.03, 1.15}};
  for (const auto& [kind, least, most] : expected) {
    const Memory page = page_of(kind, 1 << 18, random);
    const Piece piece{reinterpret_cast<int64_t>(page.data()), static_cast<int64_t>(page.size())};
    const Measured measured({&piece, 1});
    const codec::Size& size = measured.size;
    const double ratio =
        static_cast<double>(page.size()) / static_cast<double>(std::max<uint64_t>(size.nbytes, 1));
    CHECK(size.nbytes > 0);
    if (ratio <= least || ratio >= most)
      p2pkv::test::fail(__FILE__, __LINE__, "another ratio", ": " + std::to_string(ratio));
  }
  const Memory noise = page_of(Kind::kNoise, 1 << 18, random);
  const Piece piece{reinterpret_cast<int64_t>(noise.data()), static_cast<int64_t>(noise.size())};
  CHECK_EQ(Measured({&piece, 1}).size.nbytes, 0u);
}

// Every exponent in every place: each kernel gives what the portable one gives, and gets every value back.
TEST(codec_kernels_agree) {
  Random random(p2pkv::test::seed("codec_kernels"));
  for (int round = 0; round < kRounds / 2; ++round) {
    const Memory page = page_of(kKinds[random() % std::size(kKinds)], codec::kBlockBytes + 64, random);
    const uint8_t* const block = page.data() + random() % 64;
    for (const auto layout : {codec::Layout::kBf16, codec::Layout::kFp16}) {
      const auto k = static_cast<size_t>(layout);
      const auto& portable = codec::block_kernels().front();
      const codec::Window window = portable.measure[k](block);
      const auto base = round % 2 ? window.base : static_cast<uint8_t>(random());
      const size_t n = codec::packed_block_bytes(layout);
      Memory expected(n), escapes(codec::kBlockValues), values(codec::kBlockBytes);
      portable.pack[k](block, base, expected.data(), escapes.data());
      portable.unpack[k](expected.data(), base, values.data());
      for (size_t i = 0; round % 2 && i < codec::kBlockValues; ++i)
        CHECK(escapes[i] != 0 || std::memcmp(&values[2 * i], block + 2 * i, 2) == 0);
      if (round % 2) CHECK_EQ(static_cast<size_t>(std::ranges::count(escapes, 1)), window.n_escapes);
      for (const auto& kernel : codec::block_kernels()) {
        Memory packed(n + 1, kUntouched), flags(codec::kBlockValues + 1, kUntouched);
        Memory back(codec::kBlockBytes + 1, kUntouched);
        CHECK_EQ(kernel.measure[k](block).base, window.base);
        CHECK_EQ(kernel.measure[k](block).n_escapes, window.n_escapes);
        kernel.pack[k](block, base, packed.data(), flags.data());
        kernel.unpack[k](expected.data(), base, back.data());
        CHECK(packed.back() == kUntouched && flags.back() == kUntouched && back.back() == kUntouched);
        CHECK(std::equal(expected.begin(), expected.end(), packed.begin()));
        CHECK(std::equal(escapes.begin(), escapes.end(), flags.begin()));
        CHECK(std::equal(values.begin(), values.end(), back.begin()));
      }
    }
  }
}

// Any bytes may be given to whoever unpacks. What is unpacked then is of no use, but nothing else is touched;
// the sanitizers see to the reads.
TEST(codec_unpacks_garbage_without_harm) {
  Random random(p2pkv::test::seed("codec_garbage"));
  size_t n_taken = 0;
  for (int round = 0; round < 8 * kRounds; ++round) {
    const Memory page = page_of(kKinds[random() % 4], 4096 * (1 + random() % 6), random);
    const Piece piece{reinterpret_cast<int64_t>(page.data()), static_cast<int64_t>(page.size())};
    const Measured measured({&piece, 1});
    const codec::Size& size = measured.size;
    if (size.nbytes == 0) continue;
    uint64_t checksum = 0;
    Memory packed = pack({&piece, 1}, size, &checksum);
    // header and table are hit more often than they are large
    const size_t reach = random() % 2 ? std::min<size_t>(packed.size(), 40) : packed.size();
    for (uint64_t n = 1 + random() % 4; n > 0; --n) packed[random() % reach] = static_cast<uint8_t>(random());
    if (random() % 4 == 0) packed.resize(random() % (packed.size() + 1));
    if (random() % 8 == 0) packed.resize(packed.size() + random() % 200);
    const auto given = std::make_unique<uint8_t[]>(packed.size());  // its end is its end
    std::copy(packed.begin(), packed.end(), given.get());
    const size_t length = random() % 8 ? page.size() : 1 + random() % (2 * page.size());
    Cut target(length, 1 + random() % 4, random);
    n_taken += codec::unpack(given.get(), packed.size(), target.bytes());
    codec::unpack_shared(given.get(), packed.size(), target.bytes());
    CHECK(target.is_exact());
    uint64_t sum = 0;
    codec::checksum_packed(given.get(), packed.size(), length, &sum);
    if (packed.size() >= length) continue;
    Cut in_place(length, 1 + random() % 4, random);
    Memory landed(length - packed.size(), 0x55);
    landed.insert(landed.end(), packed.begin(), packed.end());
    in_place.put(landed);
    codec::unpack_in_place(in_place.bytes(), packed.size());
    CHECK(in_place.is_exact());
  }
  CHECK(n_taken > 0);  // damaged values are nobody's business but the checksum's
}

// Bytes that change while they are unpacked, as those of a page do that its owner evicts: lengths that were
// good when they were looked at are not any more. Nothing else is touched, and what came before is not
// harmed.
TEST(codec_unpacks_what_others_write_to_without_harm) {
  Random random(p2pkv::test::seed("codec_shared"));
  const Memory page = page_of(Kind::kEscapes, 8 * 4096, random);
  const Piece piece{reinterpret_cast<int64_t>(page.data()), static_cast<int64_t>(page.size())};
  const Measured measured({&piece, 1});
  uint64_t checksum = 0;
  const Memory packed = pack({&piece, 1}, measured.size, &checksum);
  const auto given = std::make_unique<uint8_t[]>(packed.size());  // its end is its end
  std::copy(packed.begin(), packed.end(), given.get());
  const size_t n_head = 16 + 4 * codec::n_blocks(page.size());
  std::atomic<bool> is_over{false};
  std::thread owner([&, seed = random()] {
    Random random(seed);
    while (!is_over) {
      // a length, a layout or a number of escapes, or a position; and back, so that most is good
      const size_t at = random() % 2 ? random() % n_head : random() % packed.size();
      const std::atomic_ref<uint8_t> byte(given[at]);
      byte.store(static_cast<uint8_t>(random()), std::memory_order_relaxed);
      for (int i = 0; i < 100; ++i) std::atomic_signal_fence(std::memory_order_seq_cst);
      byte.store(packed[at], std::memory_order_relaxed);
    }
  });
  size_t n_good = 0, n_bad = 0, n_torn = 0;
  // On a busy machine the two threads have to meet first.
  const p2pkv::Deadline patience = p2pkv::Deadline::after(30);
  for (int round = 0; round < 2 * kRounds || (n_bad + n_torn < 200 && !patience.passed()); ++round) {
    Cut target(page.size(), 1 + random() % 3, random);
    const bool is_good = codec::unpack_shared(given.get(), packed.size(), target.bytes());
    ++(is_good ? n_good : n_bad);
    n_torn += is_good && target.get() != page;
    CHECK(target.is_exact());
  }
  is_over = true;
  owner.join();
  CHECK(n_good > 0 && n_bad + n_torn > 0);
  Cut target(page.size(), 1, random);
  CHECK(codec::unpack_shared(given.get(), packed.size(), target.bytes()) && target.get() == page);
}

TEST(codec_refuses_what_it_does_not_know) {
  Random random(p2pkv::test::seed("codec_refuses"));
  const Memory page = page_of(Kind::kBf16, 3 * 4096 + 100, random);
  const Piece piece{reinterpret_cast<int64_t>(page.data()), static_cast<int64_t>(page.size())};
  uint64_t checksum = 0;
  const Memory packed = pack({&piece, 1}, Measured({&piece, 1}).size, &checksum);
  Memory room(page.size());
  const Piece target{reinterpret_cast<int64_t>(room.data()), static_cast<int64_t>(room.size())};
  CHECK(codec::unpack(packed.data(), packed.size(), {&target, 1}));
  // magic, version, length, a block's layout, a layout for the short block at the end, a number of escapes
  for (const size_t at : {0u, 4u, 8u, 16u, 28u, 18u}) {
    Memory other = packed;
    other[at] = static_cast<uint8_t>(other[at] + 3);
    CHECK(!codec::unpack(other.data(), other.size(), {&target, 1}));
  }
  const Piece shorter{target.address, target.nbytes - 1};
  CHECK(!codec::unpack(packed.data(), packed.size(), {&shorter, 1}));
  CHECK(!codec::unpack(packed.data(), packed.size() - 64, {&target, 1}));
}

TEST(codec_notices_a_page_that_changes_while_it_is_packed) {
  Random random(p2pkv::test::seed("codec_notices"));
  Memory page = page_of(Kind::kBf16, 4 * 4096, random);
  const Piece piece{reinterpret_cast<int64_t>(page.data()), static_cast<int64_t>(page.size())};
  const Measured measured({&piece, 1});
  const codec::Size& size = measured.size;
  const Memory noise = page_of(Kind::kNoise, page.size(), random);
  std::copy(noise.begin(), noise.end(), page.begin());
  Memory packed(size.nbytes + 64, kUntouched);
  Checksum sum;
  CHECK(!codec::pack({&piece, 1}, size, packed.data(), &sum));
  CHECK(std::all_of(packed.end() - 64, packed.end(), [](uint8_t byte) { return byte == kUntouched; }));
}

}  // namespace
