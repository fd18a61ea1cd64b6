// A process that maps a pool finds its pages, whoever writes to it, or nobody, and never has another page's
// bytes.
#include <fcntl.h>
#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <iostream>
#include <random>
#include <thread>

#include "kept_pool.h"
#include "pool/mapped_pool.h"
#include "seed.h"

namespace {

using p2pkv::Deadline;
using p2pkv::MappedPool;
using p2pkv::MappedRegion;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kEnoughHits = 2000;
#else
constexpr uint64_t kEnoughHits = 20000;
#endif
constexpr uint64_t kNames = 200;

std::shared_ptr<MappedPool> map(const Pool& pool, std::shared_ptr<MappedRegion> known = nullptr) {
  std::string error;
  const auto region = p2pkv::for_readers(pool.region().fd());
  const auto records = p2pkv::for_readers(pool.records_fd());
  auto mapped = MappedPool::map(pool.index_fd(), records.get(), region.get(), std::move(known), &error);
  if (!mapped) std::fprintf(stderr, "not mapped: %s\n", error.c_str());
  CHECK(mapped != nullptr);
  return mapped;
}

// The page's bytes, empty for a miss.
Bytes fetch(const MappedPool& pool, uint64_t name, size_t nbytes, bool check_sums = false) {
  const Key key = key_of(name);
  Bytes bytes(nbytes);
  const Piece piece = piece_of(bytes);
  FetchStatus status{};
  pool.fetch({1, 1, &key, &piece}, check_sums, &status, Deadline::after(60));
  CHECK(status == FetchStatus::kHit || status == FetchStatus::kMiss);
  return status == FetchStatus::kHit ? bytes : Bytes{};
}

// Sizes differ, so that blocks are cut and merged.
size_t nbytes_of(uint64_t name) {
  return (1 + name % 5) * 3000;
}

TEST(mapped_pool_has_what_its_owner_has) {
  const auto pool = make_pool(64);
  const auto mapped = map(*pool);
  CHECK(fetch(*mapped, 1, 3000).empty());
  for (uint64_t name = 0; name < 12; ++name) publish(*pool, name, nbytes_of(name));
  for (uint64_t name = 0; name < 12; ++name) {
    CHECK(fetch(*mapped, name, nbytes_of(name), true) == bytes_of(name, nbytes_of(name)));
    CHECK(fetch(*mapped, name, nbytes_of(name) + 1).empty());
    const Key key = key_of(name);
    uint8_t found[2] = {};
    Location at[2] = {};
    pool->lookup(&key, 1, &found[0], &at[0]);
    mapped->lookup(&key, 1, &found[1], &at[1]);
    CHECK(found[0] != 0 && found[1] != 0 && std::memcmp(&at[0], &at[1], sizeof at[0]) == 0);
  }
  for (uint64_t name = 0; name < 12; name += 2) retract(*pool, name);
  for (uint64_t name = 0; name < 12; ++name)
    CHECK_EQ(fetch(*mapped, name, nbytes_of(name)).empty(), name % 2 == 0);
  pool->purge();
  for (uint64_t name = 0; name < 12; ++name) CHECK(fetch(*mapped, name, nbytes_of(name)).empty());
}

// An index of the same bytes as a pool's, which a test writes to as a node gone wild may.
std::unique_ptr<p2pkv::SharedRegion> copy_of_index(const Pool& pool) {
  std::string error;
  const auto index = p2pkv::UniqueFd(fcntl(pool.index_fd(), F_DUPFD_CLOEXEC, 3));
  struct stat info{};
  CHECK_EQ(fstat(index.get(), &info), 0);
  const auto nbytes = static_cast<size_t>(info.st_size);
  const auto mapping = p2pkv::ReadOnlyMapping::map(index.get(), nbytes, &error);
  auto copy = p2pkv::SharedRegion::create(nbytes, &error);
  CHECK(mapping != nullptr && copy != nullptr);
  std::memcpy(copy->base(), mapping->base(), nbytes);
  return copy;
}

TEST(mapped_pool_is_one_whose_parts_fit_together) {
  const auto pool = make_pool(64);
  publish(*pool, 1, 3000);
  const auto index = copy_of_index(*pool);
  auto& header = *reinterpret_cast<p2pkv::PageIndexHeader*>(index->base());
  const auto records = p2pkv::for_readers(pool->records_fd());
  const auto region = p2pkv::for_readers(pool->region().fd());
  const p2pkv::PageIndexHeader right = header;
  std::string error;
  const auto mapped = [&] {
    return MappedPool::map(index->fd(), records.get(), region.get(), nullptr, &error);
  };
  CHECK(mapped() != nullptr);
  // Of huge pages a region is longer than the pool that lies in it.
  header.region_nbytes = right.data_offset + uint64_t{right.n_granules} * right.granule;
  CHECK(mapped() != nullptr && fetch(*mapped(), 1, 3000) == bytes_of(1, 3000));
  const auto is_refused = [&](auto field, auto value) {
    header = right;
    header.*field = value;
    return mapped() == nullptr;
  };
  using Header = p2pkv::PageIndexHeader;
  CHECK(is_refused(&Header::region_nbytes, right.region_nbytes + 1));
  CHECK(is_refused(&Header::data_offset, uint64_t{8}));
  CHECK(is_refused(&Header::data_offset, ~uint64_t{0}));
  CHECK(is_refused(&Header::n_granules, ~uint32_t{0}));
  CHECK(is_refused(&Header::granule, right.granule * 2));
  CHECK(is_refused(&Header::n_buckets, uint32_t{0}));
  CHECK(is_refused(&Header::n_buckets, right.n_buckets * 4));
}

TEST(mapped_pool_is_read_as_it_was_when_it_was_mapped) {
  const auto pool = make_pool(64);
  publish(*pool, 1, 3000);
  const auto index = copy_of_index(*pool);
  std::string error;
  const auto records = p2pkv::for_readers(pool->records_fd());
  const auto region = p2pkv::for_readers(pool->region().fd());
  const auto mapped = MappedPool::map(index->fd(), records.get(), region.get(), nullptr, &error);
  CHECK(mapped != nullptr);
  auto& header = *reinterpret_cast<p2pkv::PageIndexHeader*>(index->base());
  header = {~uint64_t{0}, 7, ~uint64_t{0}, ~uint64_t{0}, ~uint32_t{0}, ~uint32_t{0}, 1U << 31, 9, 9};
  CHECK(fetch(*mapped, 1, 3000) == bytes_of(1, 3000));
  CHECK_EQ(mapped->boot(), 7u);
  std::memset(index->base() + p2pkv::kIndexChainsOffset, 0xff, index->nbytes() - p2pkv::kIndexChainsOffset);
  CHECK(fetch(*mapped, 1, 3000).empty());
}

TEST(mapped_pool_has_no_guests_until_they_are_own_pages) {
  const auto pool = make_pool(8);
  const auto mapped = map(*pool);
  const Bytes bytes = bytes_of(1, kGranule);
  const Location location = store_as(true, *pool, 1, bytes);
  CHECK(fetch(*mapped, 1, kGranule).empty());
  const Key key = key_of(1);
  pool->make_own(&key, &location.generation, 1);
  CHECK(fetch(*mapped, 1, kGranule) == bytes);
}

TEST(mapped_pool_has_guests_as_long_as_its_owner_answers_for_them) {
  const auto pool = make_pool(8);
  const auto mapped = map(*pool);
  const auto until = std::make_shared<int64_t>(p2pkv::boot_now_ns() + p2pkv::kLongestBelief / 2);
  p2pkv::CurrentMappedPool current;
  current.set(mapped);
  using Find = MappedPool::Find;
  CHECK(current.findable(*mapped) == Find::kOwn);  // nobody has said anything
  mapped->find_guests_until(until);
  CHECK(current.findable(*mapped) == Find::kGuestsToo);
  current.set_member(false);
  CHECK(current.findable(*mapped) == Find::kOwn);  // nobody tells it what is taken back
  current.set_member(true);

  const Bytes bytes = bytes_of(1, kGranule);
  publish(*pool, 2, kGranule);
  const Location location = store_as(true, *pool, 1, bytes);
  const Key keys[] = {key_of(1), key_of(2)};
  Bytes to[] = {Bytes(kGranule), Bytes(kGranule)};
  const Piece pieces[] = {piece_of(to[0]), piece_of(to[1])};
  FetchStatus statuses[2] = {};
  const auto fetch_both = [&](Find what) {
    return mapped->fetch({2, 1, keys, pieces}, false, statuses, Deadline::after(60), what);
  };
  CHECK_EQ(fetch_both(Find::kGuestsToo), size_t{1});
  CHECK(statuses[0] == FetchStatus::kHit && statuses[1] == FetchStatus::kHit && to[0] == bytes);
  CHECK_EQ(fetch_both(Find::kOwn), size_t{0});
  CHECK(statuses[0] == FetchStatus::kMiss && statuses[1] == FetchStatus::kHit);
  uint8_t found[2] = {};
  Location at[2] = {};
  current.lookup(keys, 2, found, at);
  CHECK(found[0] != 0 && found[1] != 0 && at[0].offset == location.offset);
  current.lookup_own(keys, 2, found, at);
  CHECK(found[0] == 0 && found[1] != 0);

  CHECK_EQ(pool->retract_exactly(keys, &location.generation, 1), size_t{1});
  CHECK_EQ(fetch_both(Find::kGuestsToo), size_t{0});
  CHECK(statuses[0] == FetchStatus::kMiss);
  *until = p2pkv::boot_now_ns() - 1;
  CHECK(current.findable(*mapped) == Find::kOwn);
  *until = p2pkv::boot_now_ns() + 2 * p2pkv::kLongestBelief;
  CHECK(current.findable(*mapped) == Find::kOwn);  // of another clock
}

TEST(mapped_pool_that_was_left_is_read_without_a_node_and_by_its_successors_words) {
  auto pool = make_kept_pool(16);
  const KeptMemory memory(*pool);
  const auto first = map(*pool);
  for (uint64_t name = 0; name < 4; ++name) publish(*pool, name, kGranule);
  CHECK(pool->leave_memory());
  pool.reset();
  for (uint64_t name = 0; name < 4; ++name) CHECK(fetch(*first, name, kGranule) == bytes_of(name, kGranule));
  CHECK(fetch(*first, 4, kGranule).empty());

  const auto next = adopt(memory, 16);
  const auto second = map(*next, first->region());
  CHECK(second->region() == first->region());
  CHECK(retract(*next, 0));
  for (uint64_t name = 4; name < 19; ++name) publish(*next, name, kGranule);  // evicts 1 and 2
  for (uint64_t name = 0; name < 19; ++name) {
    const Bytes wanted = name < 3 ? Bytes{} : bytes_of(name, kGranule);
    CHECK(fetch(*second, name, kGranule) == wanted);
    // whoever has the index of before finds some of it, and nothing else
    const Bytes found = fetch(*first, name, kGranule);
    CHECK(found.empty() || found == wanted);
  }
  CHECK(fetch(*first, 3, kGranule) == bytes_of(3, kGranule));
}

TEST(mapped_pool_refuses_memory_that_does_not_fit_together) {
  const auto small = make_pool(8);
  const auto large = make_pool(1024);
  std::string error;
  const auto map_these = [&](int index, int records, int region) {
    return MappedPool::map(index, records, region, nullptr, &error);
  };
  CHECK(map_these(large->index_fd(), large->records_fd(), small->region().fd()) == nullptr);
  CHECK(map_these(large->index_fd(), small->records_fd(), large->region().fd()) == nullptr);
  CHECK(map_these(small->region().fd(), small->records_fd(), small->region().fd()) == nullptr);
  CHECK(!error.empty());
}

// Publishes and takes back until it is told to end; the pool has room for an eighth of all pages.
void work(Pool& pool, const std::atomic<bool>& is_over, uint64_t seed) {
  std::mt19937_64 random(seed);
  while (!is_over) {
    const uint64_t name = random() % kNames;
    if (random() % 8 == 0) {
      retract(pool, name);
    } else {
      publish(pool, name, nbytes_of(name));
    }
  }
}

TEST(mapped_pool_never_has_a_mixed_page_whoever_writes) {
  const uint64_t seed = p2pkv::test::seed("mapped_pool_never_has_a_mixed_page_whoever_writes");
  const auto pool = make_pool(64);
  const auto mapped = map(*pool);
  std::atomic<bool> is_over{false};
  std::vector<std::thread> writers;
  for (uint64_t i = 0; i < 2; ++i) writers.emplace_back([&, i] { work(*pool, is_over, seed + i); });
  std::mt19937_64 random(seed);
  uint64_t n_hits = 0, n_wrong = 0;
  const Deadline end = Deadline::after(60);
  while (n_hits < kEnoughHits && !end.passed()) {
    const uint64_t name = random() % kNames;
    const Bytes bytes = fetch(*mapped, name, nbytes_of(name));
    if (bytes.empty()) continue;
    ++n_hits;
    if (bytes != bytes_of(name, nbytes_of(name))) ++n_wrong;
  }
  is_over = true;
  for (auto& writer : writers) writer.join();
  CHECK_EQ(n_wrong, 0u);
  CHECK_EQ(n_hits, kEnoughHits);
}

uint64_t bytes_held(int fd) {
  struct stat info{};
  CHECK_EQ(fstat(fd, &info), 0);
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

TEST(mapped_pool_finds_nothing_wrong_in_memory_that_is_given_back_and_that_goes_at_once) {
  constexpr uint64_t kGranules = 4096, kLarge = 16 * kGranule, kPages = kGranules / 16;
  for (int round = 0; round < 5; ++round) {
    auto pool = make_kept_pool(kGranules);
    for (uint64_t name = 0; name < kPages; ++name) publish(*pool, name, kLarge);
    const KeptMemory memory(*pool);
    const auto mapped = map(*pool);
    CHECK(pool->leave_memory());
    pool.reset();
    const uint64_t n_before = bytes_held(memory.pool.get());
    CHECK(n_before >= kPages * kLarge);
    std::atomic<uint64_t> n_hits{0}, n_wrong{0};
    std::atomic<bool> is_over{false};
    std::vector<std::thread> readers;
    for (uint64_t i = 0; i < 3; ++i) {
      readers.emplace_back([&, i] {
        for (uint64_t name = i * 50; !is_over; name = (name + 1) % kPages) {
          const Bytes bytes = fetch(*mapped, name, kLarge);
          if (bytes.empty()) continue;
          ++n_hits;
          if (bytes != bytes_of(name, kLarge)) ++n_wrong;
        }
      });
    }
    while (n_hits < 100) std::this_thread::yield();
    std::string error;
    CHECK(p2pkv::KeptRecords::give_back(memory.records.get(), memory.pool.get(), &error));
    is_over = true;
    for (auto& reader : readers) reader.join();
    CHECK_EQ(n_wrong, 0u);
    // but for the words, and for what a reader had begun to copy
    CHECK(bytes_held(memory.pool.get()) < n_before / 8);
    for (uint64_t name = 0; name < kPages; ++name) CHECK(fetch(*mapped, name, kLarge).empty());
  }
}

}  // namespace
