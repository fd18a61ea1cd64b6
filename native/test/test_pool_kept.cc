// A pool's successor goes on with its memory: what it takes over, and what it refuses.
#include <sys/mman.h>

#include "kept_pool.h"

namespace {

using p2pkv::NamespaceEpoch;

constexpr uint64_t kGranules = 64;

// Another mapping of the same memory, as of somebody who should not write to it.
struct Writable {
  explicit Writable(int fd, size_t n) : nbytes(n) {
    base = static_cast<uint8_t*>(mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    CHECK(base != MAP_FAILED);
  }
  ~Writable() { munmap(base, nbytes); }
  uint8_t* base;
  size_t nbytes;
};

TEST(pool_kept_pages_are_found_by_a_successor_where_they_were) {
  auto pool = make_kept_pool(kGranules);
  const KeptMemory memory(*pool);
  std::vector<Location> before;
  for (uint64_t name = 0; name < 8; ++name)
    before.push_back(publish(*pool, name, 100 + name * 3000).location);
  CHECK(retract(*pool, 3));
  CHECK(pool->leave_memory());
  pool.reset();

  const auto next = adopt(memory, kGranules);
  for (uint64_t name = 0; name < 8; ++name) {
    const Key key = key_of(name);
    uint8_t found = 0;
    Location location{};
    next->lookup(&key, 1, &found, &location);
    CHECK_EQ(found != 0, name != 3);
    if (name == 3) continue;
    CHECK(std::memcmp(&location, &before[name], sizeof location) == 0);
    CHECK(fetch(*next, name, 100 + name * 3000) == bytes_of(name, 100 + name * 3000));
  }
  CHECK_EQ(next->stats().pages, 7u);
}

TEST(pool_kept_keys_that_are_there_twice_are_refused_and_left_alone) {
  auto pool = make_kept_pool(kGranules);
  const KeptMemory memory(*pool);
  const Location first = publish(*pool, 1, kGranule).location;
  const Location second = publish(*pool, 2, kGranule).location;
  CHECK(pool->leave_memory());
  pool.reset();
  const Writable records(memory.records.get(), p2pkv::records_nbytes(kGranules));
  const Writable words(memory.pool.get(), kGranule);
  const std::vector<uint8_t> before(words.base, words.base + kGranule);
  const auto record_of = [&](const Location& location) {
    auto* const all = reinterpret_cast<p2pkv::PageRecord*>(records.base + p2pkv::kRecordsOffset);
    return &all[location.word_offset / 8];
  };
  p2pkv::PageRecord* const record = record_of(second);
  const p2pkv::PageRecord right = *record;
  record->key = record_of(first)->key;
  record->sum = record->make_sum(static_cast<uint32_t>(second.word_offset / 8));
  std::string error;
  CHECK(try_to_adopt(memory, kept_options(kGranules), &error) == nullptr);
  CHECK(error == "two of its pages have one key");
  CHECK(std::memcmp(words.base, before.data(), kGranule) == 0);
  *record = right;
  CHECK_EQ(adopt(memory, kGranules)->stats().pages, 2u);
}

// Whether or not so many records are used that their memory is asked for by huge pages.
TEST(pool_kept_of_many_pages_goes_on_in_the_order_of_their_use) {
  constexpr uint64_t kMany = 5000;
  for (const uint64_t n_granules : {uint64_t{1}, uint64_t{200}}) {
    auto pool = make_kept_pool(kMany);
    const KeptMemory memory(*pool);
    const uint64_t n = kMany / n_granules;
    for (uint64_t name = 0; name < 3 * n / 2; ++name) {
      publish(*pool, name, n_granules * kGranule);
      const Key used = key_of(name * 1237 % n);
      pool->touch(&used, 1);
    }
    // by use, and by place where that is the same
    std::vector<p2pkv::PageUse> uses;
    CHECK_EQ(pool->list_uses(0, kMany, &uses), 0u);
    CHECK_EQ(uses.size(), n);
    std::stable_sort(uses.begin(), uses.end(),
                     [](const auto& a, const auto& b) { return a.stamp < b.stamp; });
    CHECK(pool->leave_memory());
    pool.reset();
    const auto next = adopt(memory, kMany);
    next->map_behind();
    std::vector<Key> oldest;
    next->list_oldest(kMany, UINT64_MAX, &oldest);
    CHECK_EQ(oldest.size(), n);
    for (uint64_t i = 0; i < n; ++i) CHECK(oldest[i] == uses[i].key);
  }
}

TEST(pool_kept_pages_go_in_the_order_of_their_use) {
  auto pool = make_kept_pool(4);
  const KeptMemory memory(*pool);
  for (uint64_t name = 0; name < 4; ++name) publish(*pool, name, kGranule);
  fetch(*pool, 0, kGranule);
  CHECK(pool->leave_memory());
  pool.reset();
  const auto next = adopt(memory, 4);
  publish(*next, 4, kGranule);
  CHECK(contains(*next, 0));
  CHECK(!contains(*next, 1));
  for (uint64_t name = 5; name < 8; ++name) publish(*next, name, kGranule);
  CHECK(!contains(*next, 0) && contains(*next, 4));
}

TEST(pool_kept_generations_go_on_above_all_that_there_were) {
  auto pool = make_kept_pool(2);
  const KeptMemory memory(*pool);
  publish(*pool, 1, kGranule);
  const Location last = publish(*pool, 2, kGranule).location;
  CHECK(retract(*pool, 2));
  CHECK(pool->leave_memory());
  pool.reset();
  const auto next = adopt(memory, 2);
  const Location location = publish(*next, 3, kGranule).location;
  CHECK_EQ(location.offset, last.offset);
  CHECK(location.generation > last.generation);
}

TEST(pool_kept_guests_are_not_taken_over) {
  auto pool = make_kept_pool(kGranules);
  const KeptMemory memory(*pool);
  const Bytes bytes = bytes_of(1, kGranule);
  for (uint64_t name = 1; name < 4; ++name) {
    const Location location = store_as(name != 3, *pool, name, bytes);
    const Key key = key_of(name);
    if (name == 2) pool->make_own(&key, &location.generation, 1);
  }
  CHECK(pool->leave_memory());
  pool.reset();
  const auto next = adopt(memory, kGranules);
  CHECK(!contains(*next, 1));
  CHECK(contains(*next, 2) && contains(*next, 3));
}

TEST(pool_kept_of_more_sizes_than_are_kept_exactly_goes_on) {
  constexpr uint64_t kMany = 16384;
  auto pool = make_kept_pool(kMany);
  const KeptMemory memory(*pool);
  for (uint64_t name = 1; name < 150; ++name) publish(*pool, name, name * kGranule);
  std::vector<uint64_t> left;
  for (uint64_t name = 1; name < 150; ++name) {
    if (contains(*pool, name)) left.push_back(name);
  }
  CHECK(left.size() > 100);
  CHECK(pool->leave_memory());
  pool.reset();
  const auto next = adopt(memory, kMany);
  CHECK_EQ(next->stats().pages, left.size());
  for (const uint64_t name : left)
    CHECK(fetch(*next, name, name * kGranule) == bytes_of(name, name * kGranule));
  for (uint64_t name = 1; name < 300; ++name)
    publish(*next, 1000 + name, name * kGranule);  // in their places
}

TEST(pool_kept_epochs_are_known_to_a_successor) {
  auto pool = make_kept_pool(2);
  const KeptMemory memory(*pool);
  p2pkv::NamespaceEpochs known;
  known.keep([&](const auto& epochs) { pool->keep_epochs(epochs); });
  for (uint64_t i = 1; i < 4; ++i) {
    const NamespaceEpoch epoch{key_of(i), 100 + i};
    CHECK(known.raise(&epoch, 1));
  }
  CHECK(pool->leave_memory());
  const NamespaceEpoch late{key_of(9), 109};
  CHECK(known.raise(&late, 1));  // nobody's memory is written to
  pool.reset();
  const auto next = adopt(memory, 2);
  CHECK_EQ(next->first_epochs().size(), 3u);
  for (const NamespaceEpoch& epoch : next->first_epochs())
    CHECK(known.greatest({epoch.name_space}) == epoch.epoch);
}

TEST(pool_kept_boots_are_known_to_a_successor) {
  auto pool = make_kept_pool(2);
  const KeptMemory memory(*pool);
  const auto follow = [&] {
    CHECK(pool->leave_memory());
    pool.reset();
    pool = adopt(memory, 2);
    return std::pair(pool->first_boots().since, pool->first_boots().last);
  };
  using Boots = std::pair<uint64_t, uint64_t>;
  CHECK(follow() == Boots(0, 0));  // of before it was written
  pool->keep_boots({5, 5});
  CHECK(follow() == Boots(5, 5));
  pool->keep_boots({5, 9});
  CHECK(follow() == Boots(5, 9));
  CHECK(follow() == Boots(5, 9));
  pool->keep_boots({11, 9});  // killed after the first of the two was written
  CHECK(follow() == Boots(0, 0));
}

TEST(pool_kept_is_not_adopted_while_somebody_may_write_to_it) {
  auto pool = make_kept_pool(2);
  const KeptMemory memory(*pool);
  std::string error;
  CHECK(!p2pkv::WriterLock::take(memory.records.get(), p2pkv::Deadline::after(0.05), &error));
  CHECK(error.find("has not ended") != std::string::npos);
  pool->leave_memory();
  CHECK(p2pkv::WriterLock::take(memory.records.get(), p2pkv::Deadline::after(0.05), &error));
}

TEST(pool_that_is_released_leaves_nothing_to_a_successor) {
  auto pool = make_kept_pool(2);
  const KeptMemory memory(*pool);
  publish(*pool, 1, kGranule);
  CHECK(pool->release_memory());
  pool.reset();
  CHECK_EQ(adopt(memory, 2)->stats().pages, 0u);
}

TEST(pool_kept_of_another_kind_is_refused_and_left_alone) {
  auto pool = make_kept_pool(kGranules);
  const KeptMemory memory(*pool);
  publish(*pool, 1, kGranule);
  CHECK(pool->leave_memory());
  pool.reset();
  std::string error;
  CHECK(try_to_adopt(memory, kept_options(kGranules * 2), &error) == nullptr);
  PoolOptions other = kept_options(kGranules);
  other.owner = 8;
  CHECK(try_to_adopt(memory, other, &error) == nullptr);
  CHECK(error == "it is of a pool with another size, granule or owner");
  const auto second = make_kept_pool(kGranules);
  KeptMemory mixed(*second);
  std::swap(mixed.records, const_cast<KeptMemory&>(memory).records);
  CHECK(try_to_adopt(mixed, kept_options(kGranules), &error) == nullptr);
  std::swap(mixed.records, const_cast<KeptMemory&>(memory).records);
  CHECK(contains(*adopt(memory, kGranules), 1));
}

// Whatever byte of what vouches for a page is another one, the page is not taken over under it.
TEST(pool_kept_records_that_are_damaged_are_refused) {
  auto pool = make_kept_pool(kGranules);
  const KeptMemory memory(*pool);
  const Location location = publish(*pool, 1, 3 * kGranule).location;
  CHECK(pool->leave_memory());
  pool.reset();
  const uint64_t granule = location.word_offset / 8;
  const Writable records(memory.records.get(), (64 << 10) + kGranules * 64);
  const Writable words(memory.pool.get(), kGranule);
  uint8_t* const record = records.base + (64 << 10) + granule * 64;
  std::string error;
  for (size_t i = 0; i < 56; ++i) {
    record[i] ^= 4;
    CHECK(try_to_adopt(memory, kept_options(kGranules), &error) == nullptr);
    record[i] ^= 4;
  }
  for (size_t i = 0; i < 64; ++i) {  // header, its sum among it
    records.base[i] ^= 4;
    CHECK(try_to_adopt(memory, kept_options(kGranules), &error) == nullptr);
    records.base[i] ^= 4;
  }
  // a page within a page, and words that were none
  for (const uint64_t wrong : {location.generation, UINT64_MAX, uint64_t{0}}) {
    auto* word = reinterpret_cast<uint64_t*>(words.base) + granule + 1;
    const uint64_t right = std::exchange(*word, wrong);
    CHECK(try_to_adopt(memory, kept_options(kGranules), &error) == nullptr);
    *word = right;
  }
  CHECK(fetch(*adopt(memory, kGranules), 1, 3 * kGranule) == bytes_of(1, 3 * kGranule));
}

TEST(pool_kept_is_handed_to_readers_for_reading_only) {
  auto pool = make_kept_pool(2);
  const p2pkv::UniqueFd reader = p2pkv::for_readers(pool->region().fd());
  CHECK(reader);
  const size_t nbytes = pool->region().nbytes();
  CHECK(mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, reader.get(), 0) == MAP_FAILED);
  CHECK(ftruncate(reader.get(), 0) != 0);
  std::string error;
  CHECK(p2pkv::ReadOnlyMapping::map(reader.get(), nbytes, &error) != nullptr);
}

TEST(pool_kept_memory_is_given_back_only_where_nobody_writes_and_its_words_are_known) {
  auto pool = make_kept_pool(kGranules);
  const KeptMemory memory(*pool);
  auto other = make_kept_pool(kGranules);
  const KeptMemory others(*other);
  publish(*pool, 1, kGranule);
  std::string error;
  const auto give_back = [&](const KeptMemory& records, const KeptMemory& of) {
    return p2pkv::KeptRecords::give_back(records.records.get(), of.pool.get(), &error);
  };
  CHECK(!give_back(memory, memory));  // its process writes to it
  CHECK(fetch(*pool, 1, kGranule) == bytes_of(1, kGranule));
  CHECK(pool->leave_memory());
  pool.reset();
  CHECK(other->leave_memory());
  other.reset();
  CHECK(!give_back(others, memory));
  {
    const Writable records(memory.records.get(), kGranule);
    ++records.base[1];  // of its magic
    CHECK(!give_back(memory, memory));
    --records.base[1];
  }
  const auto next = adopt(memory, kGranules);
  CHECK(fetch(*next, 1, kGranule) == bytes_of(1, kGranule));
}

TEST(pool_kept_memory_that_was_given_back_is_a_pool_without_pages) {
  auto pool = make_kept_pool(kGranules);
  const KeptMemory memory(*pool);
  const Location last = publish(*pool, 1, kGranule).location;
  CHECK(pool->leave_memory());
  pool.reset();
  std::string error;
  CHECK(p2pkv::KeptRecords::give_back(memory.records.get(), memory.pool.get(), &error));
  const auto next = adopt(memory, kGranules);
  CHECK_EQ(next->stats().pages, 0u);
  CHECK(publish(*next, 2, kGranule).location.generation > last.generation);
  CHECK(fetch(*next, 2, kGranule) == bytes_of(2, kGranule));
}

}  // namespace
