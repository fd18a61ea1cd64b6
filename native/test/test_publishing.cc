// What a publish tells the directory: of pages that are there and sealed, and of no others.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache/publishing.h"
#include "check.h"
#include "keys.h"
#include "page/words.h"

namespace {

using p2pkv::Deadline;
using p2pkv::Key;
using p2pkv::Location;
using p2pkv::Piece;
using p2pkv::Pool;
using p2pkv::PoolOptions;
using p2pkv::Publishing;
using p2pkv::RingTable;
using p2pkv::Sequences;
using p2pkv::Shard;
using p2pkv::test::key_of;

constexpr uint32_t kGranule = 4096;
constexpr uint64_t kOwner = 7;
constexpr uint64_t kBoot = 8;

std::shared_ptr<Pool> make_pool(uint64_t n_granules) {
  PoolOptions options{};
  options.nbytes = n_granules * kGranule;
  options.granule = kGranule;
  options.owner = kOwner;
  options.boot = kBoot;
  std::string error;
  auto pool = Pool::create(options, &error);
  CHECK(pool != nullptr);
  return pool;
}

// Of one member, which asks itself, or whom another one asks.
std::shared_ptr<RingTable> ring_of_one(bool is_own) {
  return std::make_shared<RingTable>(RingTable{{0}, {0}, 1, {1}, is_own ? 0 : -1});
}

struct Batch {
  std::vector<Key> keys;
  std::vector<uint8_t> bytes;
  std::vector<Piece> pieces;

  explicit Batch(size_t n) : bytes(kGranule, 1) {
    for (size_t i = 0; i < n; ++i) {
      keys.push_back(key_of(i));
      pieces.push_back({reinterpret_cast<int64_t>(bytes.data()), kGranule});
    }
  }
  p2pkv::PageBatch get() const { return {keys.size(), 1, keys.data(), pieces.data()}; }
};

void publish_one(Pool& pool, uint64_t name) {
  const Batch batch(1);
  const Key key = key_of(name);
  p2pkv::PoolStatus status{};
  p2pkv::Location location{};
  pool.publish({1, 1, &key, batch.pieces.data()}, &status, &location);
  CHECK(status == p2pkv::PoolStatus::kStored);
}

}  // namespace

TEST(publishing_tells_the_own_shard_of_what_is_sealed_and_of_nothing_else) {
  const auto pool = make_pool(2);
  Shard shard(1024);
  shard.set_view(&kOwner, &kBoot, 1);
  Sequences sequences;
  const Batch batch(3);
  Publishing publishing(ring_of_one(true), {});
  publishing.run(*pool, batch.get(), shard, sequences, nullptr, Deadline::after(60));
  publishing.wait(Deadline::after(10), Deadline::after(10));
  CHECK(publishing.end(Deadline::after(10)).empty());
  CHECK_EQ(publishing.n_readable(), 2u);
  CHECK_EQ(publishing.stored_bytes(), 2u * kGranule);
  std::vector<uint8_t> found(3);
  std::vector<Location> locations(3);
  shard.get(batch.keys.data(), 3, found.data(), locations.data());
  for (size_t i = 0; i < 3; ++i) {
    CHECK_EQ(found[i], i < 2 ? 1 : 0);
    CHECK_EQ(publishing.asked().answered()[i], found[i]);
    if (found[i] == 0) continue;
    CHECK(p2pkv::is_committed(locations[i].generation));
    CHECK_EQ(p2pkv::load_word(pool->region().base() + locations[i].word_offset), locations[i].generation);
  }
}

TEST(publishing_knows_whether_a_page_may_be_gone_since) {
  const auto pool = make_pool(2);
  Shard shard(1024);
  Sequences sequences;
  const Batch batch(3);
  publish_one(*pool, 100);  // so that the batch evicts something itself, which is not what is asked
  Publishing publishing(ring_of_one(true), {});
  publishing.run(*pool, batch.get(), shard, sequences, nullptr, Deadline::after(60));
  CHECK(!publishing.has_lost(*pool));
  publish_one(*pool, 101);
  CHECK(publishing.has_lost(*pool));
}

TEST(publishing_again_tells_again_and_copies_nothing) {
  const auto pool = make_pool(4);
  Sequences sequences;
  const Batch batch(3);
  for (const uint64_t stored : {uint64_t{3}, uint64_t{0}}) {
    Shard shard(1024);  // another one each time, that knows of nothing
    shard.set_view(&kOwner, &kBoot, 1);
    Publishing publishing(ring_of_one(true), {});
    publishing.run(*pool, batch.get(), shard, sequences, nullptr, Deadline::after(60));
    CHECK_EQ(publishing.n_readable(), 3u);
    CHECK_EQ(publishing.stored_bytes(), stored * kGranule);
    CHECK_EQ(shard.stats().entries, 3u);
  }
}

TEST(publishing_counts_an_owner_without_a_channel_as_silent) {
  const auto pool = make_pool(4);
  Shard shard(1024);
  Sequences sequences;
  const Batch batch(3);
  const auto ring = ring_of_one(false);
  CHECK_EQ(ring->peers_of(batch.keys.data(), 3).size(), 1u);
  Publishing publishing(ring, {});
  publishing.run(*pool, batch.get(), shard, sequences, nullptr, Deadline::after(60));
  publishing.wait(Deadline::after(60), Deadline::after(60));
  CHECK(publishing.end(Deadline::after(10)).empty());
  CHECK_EQ(publishing.n_readable(), 3u);
  CHECK_EQ(publishing.asked().silent().size(), 1u);
  CHECK_EQ(publishing.asked().answered()[0], 0);
  CHECK_EQ(shard.stats().entries, 0u);
}
