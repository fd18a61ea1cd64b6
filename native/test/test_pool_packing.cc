// Pages that lie in the pool packed: what they take of it, how they come out of it, and that threads which
// evict each other's pages meanwhile find no wrong byte.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/copy.h"
#include "check.h"
#include "codec/packed.h"
#include "keys.h"
#include "page/packed_location.h"
#include "page/words.h"
#include "pool/pool.h"
#include "seed.h"

namespace {

using p2pkv::FetchStatus;
using p2pkv::Key;
using p2pkv::Location;
using p2pkv::Piece;
using p2pkv::Pool;
using p2pkv::PoolStatus;
using p2pkv::test::key_of;

using Bytes = std::vector<uint8_t>;

constexpr uint64_t kGranule = 4096;
constexpr size_t kPage = 8 * kGranule;

std::shared_ptr<Pool> make_pool(uint64_t n_granules) {
  p2pkv::PoolOptions options{};
  options.nbytes = n_granules * kGranule;
  options.packing = p2pkv::Packing::kLossless;
  std::string error;
  auto pool = Pool::create(options, &error);
  CHECK(pool != nullptr);
  return pool;
}

// bfloat16 numbers that follow from the name; those of every third name are noise.
Bytes page_of(uint64_t name, size_t nbytes = kPage) {
  std::mt19937 random(static_cast<uint32_t>(name));
  Bytes page(nbytes);
  for (size_t i = 0; i + 1 < nbytes; i += 2) {
    const uint32_t bits = random();
    page[i] = static_cast<uint8_t>(bits);
    page[i + 1] = static_cast<uint8_t>(name % 3 == 0 ? bits >> 8 : (bits >> 8 & 0x83) | 0x3c);
  }
  return page;
}

Piece piece_of(const Bytes& bytes) {
  return {reinterpret_cast<int64_t>(bytes.data()), static_cast<int64_t>(bytes.size())};
}

PoolStatus publish(Pool& pool, uint64_t name, const Bytes& page, Location* location) {
  const Key key = key_of(name);
  const Piece piece = piece_of(page);
  PoolStatus status{};
  pool.publish({1, 1, &key, &piece}, &status, location);
  return status;
}

FetchStatus fetch(Pool& pool, uint64_t name, Bytes* page) {
  const Key key = key_of(name);
  const Piece piece = piece_of(*page);
  FetchStatus status{};
  pool.fetch({1, 1, &key, &piece}, &status);
  return status;
}

TEST(pool_packing_takes_less_room_and_says_so) {
  const auto pool = make_pool(64);
  Location packed{}, plain{};
  CHECK(publish(*pool, 1, page_of(1), &packed) == PoolStatus::kStored);
  CHECK(publish(*pool, 3, page_of(3), &plain) == PoolStatus::kStored);
  CHECK_EQ(packed.length, kPage);
  CHECK_EQ(plain.length, kPage);
  CHECK_EQ(p2pkv::packed_nbytes(plain), 0u);
  CHECK(p2pkv::packed_nbytes(packed) > kPage / 2 && p2pkv::packed_nbytes(packed) <= 7 * kGranule);
  CHECK_EQ(pool->stats().used, (7 + 8) * kGranule);
  CHECK_EQ(packed.generation % 2, 1u);
  CHECK_EQ(p2pkv::load_word(pool->region().base() + packed.word_offset), p2pkv::word_value(packed));
  for (const uint64_t name : {1, 3}) {
    Bytes out(kPage);
    CHECK(fetch(*pool, name, &out) == FetchStatus::kHit);
    CHECK(out == page_of(name));
  }
  Bytes shorter(kPage - 2);
  CHECK(fetch(*pool, 1, &shorter) == FetchStatus::kOtherLength);
  CHECK_EQ(pool->stats().packed.n_packed, 1u);
  CHECK_EQ(pool->stats().packed.n_tried, 2u);
}

TEST(pool_packing_blocks_of_promoted_pages_are_taken_as_they_are) {
  const auto pool = make_pool(64);
  Location location{};
  publish(*pool, 1, page_of(1), &location);
  const uint8_t* const from = pool->region().base() + location.offset;
  const Bytes packed(from, from + p2pkv::packed_nbytes(location));
  for (const bool is_damaged : {false, true}) {
    const uint64_t name = is_damaged ? 5 : 4;
    p2pkv::Block block{key_of(name), kPage, location.checksum, packed.size()};
    PoolStatus status{};
    pool->reserve_blocks(&block, 1, &status);
    CHECK(status == PoolStatus::kStored);
    std::memcpy(block.data, packed.data(), packed.size());
    if (is_damaged) block.data[0] ^= 1;
    const uint8_t is_filled = 1;
    uint8_t found = 0;
    uint64_t ticket = 0;
    Location promoted{};
    pool->commit_blocks(&block, 1, &is_filled, 0, &found, &ticket, &promoted);
    CHECK_EQ(p2pkv::packed_nbytes(promoted), packed.size());
    Bytes out(kPage);
    CHECK(fetch(*pool, name, &out) == (is_damaged ? FetchStatus::kUnreadable : FetchStatus::kHit));
    CHECK(is_damaged || out == page_of(1));
  }
}

// What a peer does: copies what is stored, proves it, and unpacks it.
bool read_as_a_peer(const Pool& pool, const Location& location, Bytes* page) {
  Bytes stored(p2pkv::stored_nbytes(location));
  p2pkv::copy_bytes(stored.data(), pool.region().base() + location.offset, stored.size());
  if (p2pkv::load_word_after_bytes(pool.region().base() + location.word_offset) !=
      p2pkv::word_value(location))
    return false;
  if (p2pkv::packed_nbytes(location) == 0) {
    *page = stored;
    return true;
  }
  page->resize(location.length);
  const Piece piece = piece_of(*page);
  CHECK(p2pkv::codec::unpack(stored.data(), stored.size(), {&piece, 1}));
  return true;
}

TEST(pool_packing_races_serve_no_wrong_byte) {
  constexpr uint64_t kNames = 24;
  const auto pool = make_pool(64);
  const uint64_t seed = p2pkv::test::seed("pool_packing_races");
  std::vector<Bytes> pages;
  for (uint64_t name = 0; name < kNames; ++name) pages.push_back(page_of(name, kPage - name % 4 * kGranule));
  std::atomic<uint64_t> n_hits{0}, n_read{0};
  const auto work = [&](uint64_t number) {
    std::mt19937_64 random(seed + number);
    for (int i = 0; i < 400; ++i) {
      const uint64_t name = random() % kNames;
      Location location{};
      publish(*pool, name, pages[name], &location);
      const uint64_t other = random() % kNames;
      Bytes out(pages[other].size());
      if (fetch(*pool, other, &out) == FetchStatus::kHit) {
        ++n_hits;
        CHECK(out == pages[other]);
      }
      const Key key = key_of(other);
      uint8_t found = 0;
      pool->lookup(&key, 1, &found, &location);
      if (found == 0 || !read_as_a_peer(*pool, location, &out)) continue;
      ++n_read;
      CHECK(out == pages[other]);
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t number = 0; number < 3; ++number) threads.emplace_back(work, number);
  for (std::thread& thread : threads) thread.join();
  CHECK(n_hits > 100 && n_read > 100);
  CHECK(pool->stats().evicted_pages > 100);
  CHECK(pool->stats().packed.n_packed > 100);
}

}  // namespace
