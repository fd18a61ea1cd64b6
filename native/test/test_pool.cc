#include "pool_calls.h"

namespace {

TEST(pool_gives_back_the_bytes_and_says_where_they_lie) {
  const auto pool = make_pool(16);
  const Stored stored = publish(*pool, 1, 5000);
  CHECK_EQ(static_cast<int>(stored.status), static_cast<int>(PoolStatus::kStored));
  CHECK_EQ(stored.location.owner, 7u);
  CHECK_EQ(stored.location.boot, 8u);
  CHECK_EQ(stored.location.region, 9u);
  CHECK_EQ(stored.location.length, 5000u);
  CHECK_EQ(stored.location.flags, p2pkv::kResident);
  const Bytes bytes = bytes_of(1, 5000);
  CHECK_EQ(stored.location.checksum, p2pkv::checksum(bytes.data(), bytes.size()));
  CHECK(std::memcmp(pool->region().base() + stored.location.offset, bytes.data(), bytes.size()) == 0);
  CHECK(p2pkv::is_committed(stored.location.generation));
  CHECK_EQ(word(*pool, stored.location), stored.location.generation);
  CHECK(fetch(*pool, 1, 5000) == bytes);
  CHECK(fetch(*pool, 1, 4999).empty());
  CHECK(fetch(*pool, 2, 5000).empty());
}

TEST(pool_publishing_again_keeps_the_first_and_touches_it) {
  const auto pool = make_pool(2);
  publish(*pool, 1, 100);
  publish(*pool, 2, 100);
  CHECK(publish(*pool, 1, 100).status == PoolStatus::kExists);
  CHECK(publish(*pool, 1, 99).status == PoolStatus::kOtherLength);
  publish(*pool, 3, 100);
  CHECK(contains(*pool, 1));
  CHECK(!contains(*pool, 2));
}

TEST(pool_evicts_what_was_used_longest_ago_and_tells_of_it) {
  const auto pool = make_pool(4);
  std::vector<Location> locations;
  for (uint64_t name = 0; name < 4; ++name) locations.push_back(publish(*pool, name, kGranule).location);
  fetch(*pool, 0, kGranule);
  publish(*pool, 4, kGranule);
  CHECK(contains(*pool, 0));
  CHECK(!contains(*pool, 1));
  CHECK(word(*pool, locations[1]) != locations[1].generation);
  const auto evicted = pool->drain_evicted(10, 0);
  CHECK_EQ(evicted.size(), 1u);
  CHECK(evicted[0].key == key_of(1));
  CHECK(std::memcmp(&evicted[0].location, &locations[1], sizeof(Location)) == 0);
}

TEST(pool_the_front_of_a_batch_is_stored_and_stays_longest) {
  const auto pool = make_pool(4);
  std::vector<Key> keys;
  std::vector<Piece> pieces;
  const Bytes bytes(kGranule, 5);
  for (uint64_t name = 0; name < 6; ++name) {
    keys.push_back(key_of(name));
    pieces.push_back(piece_of(bytes));
  }
  publish(*pool, 0, kGranule);  // so that the front exists already: the batch must not evict it
  std::vector<PoolStatus> statuses(6);
  std::vector<Location> locations(6);
  pool->publish({6, 1, keys.data(), pieces.data()}, statuses.data(), locations.data());
  CHECK(statuses[0] == PoolStatus::kExists);
  for (size_t i = 1; i < 4; ++i) CHECK(statuses[i] == PoolStatus::kStored);
  for (size_t i = 4; i < 6; ++i) CHECK(statuses[i] == PoolStatus::kNoRoom);
  for (uint64_t name = 0; name < 4; ++name) CHECK(contains(*pool, name));
  for (uint64_t last = 3; last > 0; --last) {
    publish(*pool, 100 + last, kGranule);
    CHECK(!contains(*pool, last));
    CHECK(contains(*pool, last - 1));
  }
}

TEST(pool_copies_nothing_more_once_the_deadline_has_passed) {
  constexpr size_t kLarge = 4 << 20;
  const auto pool = make_pool(16 * (kLarge / kGranule));
  const Bytes bytes(kLarge, 5);
  std::vector<Bytes> out(8, Bytes(kLarge, 0));
  std::vector<Key> keys;
  std::vector<Piece> pieces, out_pieces;
  for (uint64_t name = 0; name < 8; ++name) {
    keys.push_back(key_of(name));
    pieces.push_back(piece_of(bytes));
    out_pieces.push_back(piece_of(out[name]));
  }
  const auto passed = p2pkv::Deadline::after(0);
  std::vector<PoolStatus> statuses(8);
  std::vector<Location> locations(8);
  pool->publish({8, 1, keys.data(), pieces.data()}, statuses.data(), locations.data(), passed);
  for (size_t i = 1; i < 8; ++i) {
    CHECK(statuses[i] == PoolStatus::kTimedOut);
    CHECK_EQ(locations[i].length, 0u);
    CHECK(!contains(*pool, i));
  }
  CHECK_EQ(pool->stats().used,
           statuses[0] == PoolStatus::kStored ? kLarge : 0u);  // their blocks are free again
  pool->publish({8, 1, keys.data(), pieces.data()}, statuses.data(), locations.data());
  std::vector<FetchStatus> fetched(8);
  pool->fetch({8, 1, keys.data(), out_pieces.data()}, fetched.data(), passed);
  for (size_t i = 1; i < 8; ++i) {
    CHECK(fetched[i] == FetchStatus::kTimedOut);
    CHECK(out[i] == Bytes(kLarge, 0));
  }
  pool->fetch({8, 1, keys.data(), out_pieces.data()}, fetched.data());
  for (size_t i = 0; i < 8; ++i) CHECK(fetched[i] == FetchStatus::kHit && out[i] == bytes);
}

TEST(pool_a_batch_does_not_evict_what_it_is_about_to_find) {
  const auto pool = make_pool(2);
  publish(*pool, 1, kGranule);  // used longest ago, but asked for again
  publish(*pool, 2, kGranule);
  const Bytes bytes(kGranule, 5);
  const Key keys[] = {key_of(3), key_of(1)};
  const Piece pieces[] = {piece_of(bytes), piece_of(bytes)};
  PoolStatus statuses[2];
  Location locations[2];
  pool->publish({2, 1, keys, pieces}, statuses, locations);
  CHECK(statuses[0] == PoolStatus::kStored);
  CHECK(statuses[1] == PoolStatus::kExists);
  CHECK(!contains(*pool, 2));
}

TEST(pool_a_large_page_gets_in_among_small_ones_and_the_other_way_round) {
  const auto pool = make_pool(8);
  for (uint64_t name = 0; name < 8; ++name) publish(*pool, name, kGranule);
  CHECK(publish(*pool, 100, 4 * kGranule).status == PoolStatus::kStored);
  CHECK_EQ(pool->stats().pages, 5u);
  for (uint64_t name = 10; name < 18; ++name) publish(*pool, name, kGranule);
  CHECK(!contains(*pool, 100));
  CHECK_EQ(pool->stats().pages, 8u);
  CHECK(publish(*pool, 101, 8 * kGranule).status == PoolStatus::kStored);
  CHECK_EQ(pool->stats().pages, 1u);
  CHECK(publish(*pool, 102, 8 * kGranule + 1).status == PoolStatus::kTooLarge);
  CHECK(contains(*pool, 101));
}

TEST(pool_a_large_page_goes_round_a_pinned_one) {
  const auto pool = make_pool(8);
  for (uint64_t name = 0; name < 8; ++name) publish(*pool, name, kGranule);
  const uint64_t ticket = pin(*pool, 0, 10);
  CHECK(publish(*pool, 100, 4 * kGranule).status == PoolStatus::kStored);
  CHECK(contains(*pool, 0));
  CHECK(publish(*pool, 101, 8 * kGranule).status == PoolStatus::kNoRoom);
  CHECK(unpin(*pool, ticket));
  CHECK(publish(*pool, 101, 8 * kGranule).status == PoolStatus::kStored);
}

TEST(pool_pins_keep_pages_until_unpin_or_the_end_of_the_lease) {
  now_ns = 0;
  const auto pool = make_pool(2, 2 * kGranule);
  publish(*pool, 1, 100);
  publish(*pool, 2, 100);
  const uint64_t first = pin(*pool, 1, 10);
  const uint64_t second = pin(*pool, 2, 10);
  CHECK_EQ(pool->stats().pinned_bytes, 2u * kGranule);
  CHECK(publish(*pool, 3, 100).status == PoolStatus::kNoRoom);
  CHECK(unpin(*pool, first));
  CHECK(!unpin(*pool, first));
  CHECK(publish(*pool, 3, 100).status == PoolStatus::kStored);
  CHECK(!contains(*pool, 1));
  now_ns += 10'000'000'000;
  CHECK(publish(*pool, 4, 100).status == PoolStatus::kStored);
  CHECK(publish(*pool, 5, 100).status == PoolStatus::kStored);
  CHECK(!contains(*pool, 2));
  CHECK_EQ(pool->stats().pinned_bytes, 0u);
  const uint64_t reused = pin(*pool, 5, 10);
  CHECK(!unpin(*pool, second));
  CHECK(!unpin(*pool, first));
  CHECK(!unpin(*pool, 0));
  CHECK_EQ(pool->stats().pinned_bytes, uint64_t{kGranule});
  CHECK(unpin(*pool, reused));
}

TEST(pool_pins_hold_no_more_than_their_limit) {
  const auto pool = make_pool(4);  // so two granules
  for (uint64_t name = 0; name < 4; ++name) publish(*pool, name, 100);
  const uint64_t first = pin(*pool, 0, 10);
  const uint64_t again = pin(*pool, 0, 10);
  CHECK(pin(*pool, 1, 10) != 0);
  CHECK_EQ(pin(*pool, 2, 10), 0u);
  CHECK_EQ(pin(*pool, 99, 10), 0u);
  CHECK(unpin(*pool, first));
  CHECK_EQ(pin(*pool, 2, 10), 0u);
  CHECK(unpin(*pool, again));
  CHECK(pin(*pool, 2, 10) != 0);
}

TEST(pool_a_retracted_page_is_stale_at_once_but_keeps_its_bytes_while_pinned) {
  const auto pool = make_pool(1, kGranule);
  const Location location = publish(*pool, 1, 100).location;
  const uint64_t ticket = pin(*pool, 1, 10);
  CHECK(retract(*pool, 1));
  CHECK(!retract(*pool, 1));
  CHECK(!contains(*pool, 1));
  CHECK(!p2pkv::is_committed(word(*pool, location)));
  CHECK(publish(*pool, 1, 100).status == PoolStatus::kNoRoom);
  CHECK_EQ(pool->region().base()[location.offset], bytes_of(1, 1)[0]);
  CHECK(unpin(*pool, ticket));
  CHECK_EQ(pool->stats().used, 0u);
  const Location again = publish(*pool, 1, 100).location;
  CHECK_EQ(again.offset, location.offset);
  CHECK(again.generation > location.generation);
}

TEST(pool_a_page_published_again_has_another_generation_wherever_it_lies) {
  const auto pool = make_pool(16);
  publish(*pool, 0, kGranule);
  const Location before = publish(*pool, 1, kGranule).location;
  CHECK(retract(*pool, 1));
  publish(*pool, 2, kGranule);  // takes the block that was free
  const Location after = publish(*pool, 1, kGranule).location;
  CHECK(after.offset != before.offset);
  CHECK(after.generation > before.generation);
  CHECK_EQ(word(*pool, after), after.generation);
}

TEST(pool_gives_its_memory_back_whoever_still_holds_it) {
  const auto pool = make_pool(4);
  publish(*pool, 1, 100);
  const uint64_t ticket = pin(*pool, 1, 10);
  CHECK(pool->release_memory());
  CHECK(pool->region().base() == nullptr);
  CHECK(!unpin(*pool, ticket));
  CHECK(!contains(*pool, 1));
  CHECK(fetch(*pool, 1, 100).empty());
  CHECK(publish(*pool, 2, 100).status == PoolStatus::kNoRoom);
  CHECK_EQ(pool->purge(), 0u);
  CHECK_EQ(pool->stats().used, 0u);
  CHECK(pool->release_memory());
}

TEST(pool_keeps_its_memory_while_somebody_is_copying_there) {
  const auto pool = make_pool(4);
  p2pkv::Block block{key_of(1), 100};
  PoolStatus status{};
  pool->reserve_blocks(&block, 1, &status);
  CHECK(status == PoolStatus::kStored);
  CHECK(!pool->release_memory());
  std::memset(block.data, 1, block.length);
  const uint8_t is_filled = 1;
  uint8_t found = 1;
  uint64_t ticket = 1;
  Location location{};
  pool->commit_blocks(&block, 1, &is_filled, 10, &found, &ticket, &location);
  CHECK_EQ(found, 0);
  CHECK_EQ(ticket, 0u);
  CHECK(pool->release_memory());
}

TEST(pool_refuses_impossible_sizes) {
  std::string error;
  for (const uint64_t nbytes : {uint64_t{0}, uint64_t{4095}, uint64_t{4097}}) {
    PoolOptions options{};
    options.nbytes = nbytes;
    error.clear();
    CHECK(Pool::create(options, &error) == nullptr);
    CHECK(error.find(std::to_string(nbytes)) != std::string::npos);
  }
  PoolOptions options{};
  options.nbytes = 6300;
  options.granule = 63;
  CHECK(Pool::create(options, &error) == nullptr);
}

}  // namespace
