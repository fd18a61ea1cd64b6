// The plans of a fetch: which bytes of an owner's region go where, however the pages are cut.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "cache/fetch_batch.h"
#include "check.h"
#include "codec/packed.h"
#include "keys.h"
#include "page/packed_location.h"
#include "seed.h"

namespace {

using p2pkv::Deadline;
using p2pkv::FetchBatch;
using p2pkv::Key;
using p2pkv::Location;
using p2pkv::LocationCache;
using p2pkv::Piece;
using p2pkv::Shard;
using p2pkv::Status;
using p2pkv::test::key_of;

constexpr uint64_t kBoot = 5;

// A batch of which every page is located, at one of two owners.
struct Located {
  Shard shard{1 << 12};
  LocationCache cache{1 << 12, 100.0};
  FetchBatch batch;

  Located(const std::vector<Piece>& pieces, const std::vector<int32_t>& memory_of, size_t n_pieces,
          const std::vector<uint64_t>& offsets, uint32_t flags = p2pkv::kResident)
      : batch(keys(pieces.size() / n_pieces), pieces, memory_of, n_pieces) {
    const uint64_t owners[] = {1, 2};
    const uint64_t boots[] = {kBoot, kBoot};
    shard.set_view(owners, boots, 2);
    std::vector<Location> locations;
    std::vector<int64_t> pages;
    for (size_t page = 0; page < batch.n_pages(); ++page) {
      uint64_t length = 0;
      for (size_t i = 0; i < n_pieces; ++i)
        length += static_cast<uint64_t>(pieces[page * n_pieces + i].nbytes);
      locations.push_back({1 + page % 2, kBoot, offsets[page], length, 8 * page, 2 * page, 0, 0, flags});
      pages.push_back(static_cast<int64_t>(page));
    }
    const std::vector<uint8_t> found(pages.size(), 1);
    batch.locate(pages.data(), found.data(), locations.data(), pages.size(), &shard, &cache);
  }

  static std::vector<Key> keys(size_t n) {
    std::vector<Key> keys;
    for (uint64_t name = 0; name < n; ++name) keys.push_back(key_of(name));
    return keys;
  }
};

TEST(fetch_batch_plans_each_piece_once_whatever_the_split) {
  std::mt19937_64 random(p2pkv::test::seed("fetch_batch_plans_each_piece_once"));
  const std::vector<int64_t> bases{1 << 20, 1 << 22, 1 << 24};
  for (int round = 0; round < 200; ++round) {
    const size_t n_pages = 1 + random() % 20;
    const size_t n_pieces = 1 + random() % 5;
    std::vector<Piece> pieces;
    std::vector<int32_t> memory_of;
    for (size_t i = 0; i < n_pages * n_pieces; ++i) {
      memory_of.push_back(static_cast<int32_t>(random() % 3));
      const int64_t address =
          bases[static_cast<size_t>(memory_of.back())] + static_cast<int64_t>(random() % 100'000);
      pieces.push_back({address, static_cast<int64_t>(1 + random() % 1000)});
    }
    std::vector<uint64_t> offsets;
    for (size_t page = 0; page < n_pages; ++page) offsets.push_back(page << 16);
    Located located(pieces, memory_of, n_pieces, offsets);
    std::multiset<int64_t> planned, expected;
    for (const Piece& piece : pieces) expected.insert(piece.address);
    for (const auto& owner : located.batch.group_by_owner(99)) {
      for (const int32_t leg : owner.legs) {
        const auto plan = located.batch.plan(owner, {leg}, bases[static_cast<size_t>(leg)]);
        CHECK_EQ(plan.words.size(), plan.spans.size());
        size_t next = 0;
        for (const size_t page : owner.pages) {
          auto remote = static_cast<int64_t>(offsets[page]);
          for (size_t i = page * n_pieces; i < (page + 1) * n_pieces; ++i) {
            if (memory_of[i] == leg) {
              const auto& span = plan.spans.at(next);
              CHECK_EQ(span.local + bases[static_cast<size_t>(leg)], pieces[i].address);
              CHECK_EQ(span.remote, remote);
              CHECK_EQ(span.length, pieces[i].nbytes);
              CHECK_EQ(plan.words.at(next).value, 2 * page);
              planned.insert(pieces[i].address);
              ++next;
            }
            remote += pieces[i].nbytes;
          }
        }
        CHECK_EQ(next, plan.spans.size());
      }
    }
    CHECK(planned == expected);
  }
}

TEST(fetch_batch_a_page_is_as_good_as_its_worst_piece) {
  const std::vector<Piece> pieces{{16, 8}, {32, 8}, {48, 8}, {64, 8}, {80, 8}, {96, 8}};
  Located located(pieces, {0, 1, 0, 1, 0, 1}, 2, {0, 4096, 8192});
  for (const auto& owner : located.batch.group_by_owner(2)) {  // page 1 leads to the own pool: it is stale
    CHECK_EQ(owner.key, 1u);
    located.batch.land(owner, {0}, {Status::kOk, Status::kOk});
    located.batch.land(owner, {1}, {Status::kRejected, Status::kOk});
    CHECK_EQ(located.batch.settle(owner, false, Deadline::after(10)).n_pages, 1u);
  }
  CHECK(located.batch.outcomes() == (std::vector<uint8_t>{0, 0, 1}));
  CHECK_EQ(located.batch.misses()[FetchBatch::kRejected], 2u);
}

TEST(fetch_batch_a_piece_that_was_never_read_makes_no_hit) {
  const std::vector<Piece> pieces{{16, 8}, {32, 8}};
  Located located(pieces, {0, 1}, 2, {0});
  for (const auto& owner : located.batch.group_by_owner(99)) {
    located.batch.land(owner, {0}, {Status::kOk});
    CHECK_EQ(located.batch.settle(owner, false, Deadline::after(10)).n_pages, 0u);
  }
  CHECK_EQ(located.batch.misses()[FetchBatch::kPeerLost], 1u);
}

TEST(fetch_batch_asks_an_owner_with_a_disk_itself_for_what_it_rejected) {
  for (const bool has_disk : {true, false}) {
    Located located({{16, 8}}, {0}, 1, {0}, has_disk ? p2pkv::kResident | p2pkv::kHasDisk : p2pkv::kResident);
    for (const auto& owner : located.batch.group_by_owner(99)) {
      located.batch.land(owner, {0}, {Status::kRejected});
      located.batch.settle(owner, false, Deadline::after(10));
    }
    std::vector<Key> dropped;
    std::vector<Location> locations;
    CHECK_EQ(located.batch.forget_stale(99, &located.cache, &dropped, &locations), 1u);
    CHECK_EQ(located.batch.cold(99).size(), has_disk ? 1u : 0u);
    CHECK_EQ(located.batch.unlocated().size(), has_disk ? 0u : 1u);
    CHECK_EQ(dropped.size(), has_disk ? 0u : 1u);
    CHECK_EQ(located.cache.size(), 0u);
  }
}

TEST(fetch_batch_reads_nothing_that_no_word_would_prove) {
  for (const auto& [word_offset, generation] : {std::pair{p2pkv::kNoWord, uint64_t{2}}, {uint64_t{64}, 3}}) {
    Located located({{16, 8}}, {0}, 1, {0});
    const Location bad{1, kBoot, 0, 8, word_offset, generation, 0, 0, p2pkv::kResident};
    const int64_t page = 0;
    const uint8_t found = 1;
    located.batch.locate(&page, &found, &bad, 1, &located.shard, &located.cache);
    CHECK(located.batch.group_by_owner(99).empty());
    std::vector<Key> dropped;
    std::vector<Location> locations;
    located.batch.forget_stale(99, &located.cache, &dropped, &locations);
    CHECK_EQ(dropped.size(), 1u);
    CHECK_EQ(located.batch.outcomes()[0], 0);
  }
}

TEST(fetch_batch_survives_a_location_beyond_all_memory) {
  // Locations come off the wire; the transport refuses such a span, but computing it must be sound.
  constexpr auto kMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  for (const uint64_t offset : {kMax, kMax - 4, ~uint64_t{0}, uint64_t{1} << 63}) {
    Located located({{16, 8}, {32, 8}}, {0, 0}, 2, {offset});
    for (const auto& owner : located.batch.group_by_owner(99)) {
      const auto plan = located.batch.plan(owner, {0}, 0);
      CHECK_EQ(plan.spans.size(), 2u);
      CHECK_EQ(static_cast<uint64_t>(plan.spans[1].remote), offset + 8);
    }
  }
}

// A page of bfloat16 numbers in three pieces, of which the last `packed.size()` bytes hold its packed form,
// as a read leaves them.
struct Landed {
  std::vector<uint8_t> page = std::vector<uint8_t>(8 * 4096);
  std::vector<uint8_t> memory = page;
  std::vector<uint8_t> packed;
  std::vector<Piece> pieces;
  Location location{};

  Landed() {
    for (size_t i = 0; i < page.size(); i += 2) page[i] = static_cast<uint8_t>(i * 7), page[i + 1] = 0x3f;
    const Piece whole{reinterpret_cast<int64_t>(page.data()), static_cast<int64_t>(page.size())};
    p2pkv::codec::Block table[8];
    const auto size = p2pkv::codec::measure({&whole, 1}, table);
    packed.resize(size.nbytes);
    p2pkv::Checksum sum;
    CHECK(p2pkv::codec::pack({&whole, 1}, size, packed.data(), &sum));
    std::copy(packed.begin(), packed.end(), memory.end() - static_cast<ptrdiff_t>(packed.size()));
    int64_t at = reinterpret_cast<int64_t>(memory.data());
    // the first lies in front of all that is read
    for (const int64_t nbytes : {1000, 20000, 8 * 4096 - 21000}) {
      pieces.push_back({at, nbytes});
      at += nbytes;
    }
    const auto units = static_cast<uint32_t>(packed.size() / p2pkv::kPackedUnit);
    location = {
        1, kBoot, 512, page.size(), 64, 7, sum.finish(), 0, p2pkv::kResident | units << p2pkv::kPackedShift};
  }
  void locate(Located* located) const {
    const int64_t row = 0;
    const uint8_t found = 1;
    located->batch.locate(&row, &found, &location, 1, &located->shard, &located->cache);
  }
};

TEST(fetch_batch_reads_a_packed_page_into_the_end_of_its_pieces) {
  const Landed landed;
  Located located(landed.pieces, {0, 1, 1}, 3, {0});
  landed.locate(&located);
  const auto& owner = located.batch.group_by_owner(99).at(0);
  CHECK(owner.legs == (std::vector<int32_t>{1}));  // nothing is read into the first piece
  const auto plan = located.batch.plan(owner, {1}, 0);
  CHECK_EQ(plan.spans.size(), 2u);
  const auto n_packed = static_cast<int64_t>(landed.packed.size());
  CHECK_EQ(plan.spans[0].length + plan.spans[1].length, n_packed);
  CHECK_EQ(plan.spans[0].remote, 512);
  CHECK_EQ(plan.spans[1].remote, 512 + plan.spans[0].length);
  CHECK_EQ(plan.spans[0].local + plan.spans[0].length, landed.pieces[1].address + landed.pieces[1].nbytes);
  CHECK_EQ(plan.spans[1].local, landed.pieces[2].address);
  for (const auto& word : plan.words) CHECK(word.offset == 64 && word.value == 6);
}

TEST(fetch_batch_unpacks_what_was_proven_and_nothing_else) {
  const struct {
    Status status;
    size_t damaged;
    double seconds;
    FetchBatch::Miss miss;
  } cases[] = {{Status::kOk, SIZE_MAX, 10, FetchBatch::kMissKinds},
               {Status::kOk, 0, 10, FetchBatch::kUnreadable},
               {Status::kOk, 16, 10, FetchBatch::kUnreadable},
               {Status::kOk, 4000, 10, FetchBatch::kChecksum},
               {Status::kOk, SIZE_MAX, 0, FetchBatch::kTimedOut},
               {Status::kRejected, SIZE_MAX, 10, FetchBatch::kRejected}};
  for (const auto& [status, damaged, seconds, miss] : cases) {
    Landed landed;
    if (damaged != SIZE_MAX) landed.memory[landed.memory.size() - landed.packed.size() + damaged] ^= 0x55;
    Located located(landed.pieces, {0, 0, 0}, 3, {0});
    landed.locate(&located);
    const auto& owner = located.batch.group_by_owner(99).at(0);
    located.batch.land(owner, {0}, {Status::kOk, status});
    located.batch.settle(owner, true, Deadline::after(seconds));
    const bool is_hit = located.batch.outcomes()[0] != 0;
    CHECK_EQ(is_hit, miss == FetchBatch::kMissKinds);
    if (is_hit) {
      CHECK(landed.memory == landed.page);
    } else {
      CHECK_EQ(located.batch.misses()[miss], 1u);
    }
  }
}

TEST(fetch_batch_unpacks_what_is_lent_where_it_lies) {
  const struct {
    Status status;
    size_t damaged;
    FetchBatch::Miss miss;
  } cases[] = {{Status::kOk, SIZE_MAX, FetchBatch::kMissKinds},
               {Status::kOk, 0, FetchBatch::kUnreadable},
               {Status::kOk, 4000, FetchBatch::kChecksum},
               {Status::kRejected, SIZE_MAX, FetchBatch::kRejected},
               {Status::kRejected, 0, FetchBatch::kRejected}};
  for (const auto& [status, damaged, miss] : cases) {
    Landed landed;
    if (damaged != SIZE_MAX) landed.packed[damaged] ^= 0x55;
    landed.memory.assign(landed.memory.size(), 0);
    Located located(landed.pieces, {1, 1, 1}, 3, {0});
    landed.locate(&located);
    const auto& owner = located.batch.group_by_owner(99).at(0);
    const FetchBatch::Leg leg{1, true};
    const auto plan = located.batch.plan(owner, leg, landed.pieces[0].address);
    CHECK(plan.taken == (std::vector<size_t>{0}));
    CHECK_EQ(plan.spans.size(), 1u);
    CHECK(plan.spans[0].local == 0 && plan.spans[0].remote == 512);
    CHECK_EQ(plan.spans[0].length, static_cast<int64_t>(landed.packed.size()));
    CHECK(plan.words.at(0).offset == 64 && plan.words.at(0).value == 6);
    located.batch.take_lent(0, landed.packed.data());
    CHECK_EQ(located.batch.outcomes()[0], 0);  // it is not proven yet
    located.batch.land(owner, leg, {status});
    located.batch.settle(owner, true, Deadline::after(0));
    CHECK_EQ(located.batch.outcomes()[0] != 0, miss == FetchBatch::kMissKinds);
    if (miss == FetchBatch::kMissKinds) {
      CHECK(landed.memory == landed.page);
    } else {
      CHECK_EQ(located.batch.misses()[miss], 1u);
    }
  }
}

TEST(fetch_batch_has_nothing_unpacked_where_it_lies_that_lies_in_two_memories) {
  const Landed landed;
  Located located(landed.pieces, {0, 1, 1}, 3, {0});
  landed.locate(&located);
  const auto& owner = located.batch.group_by_owner(99).at(0);
  const auto plan = located.batch.plan(owner, {1, true}, 0);
  CHECK(plan.taken.empty());
  CHECK_EQ(plan.spans.size(), 2u);
}

TEST(fetch_batch_believes_no_packed_page_that_is_not_shorter_or_whose_word_is_odd) {
  for (const auto& [length, generation] :
       {std::pair{uint64_t{64}, uint64_t{7}}, {uint64_t{8}, 7}, {uint64_t{8192}, 6}}) {
    Landed landed;
    landed.location.length = length;
    landed.location.generation = generation;
    Located located(landed.pieces, {0, 0, 0}, 3, {0});
    landed.locate(&located);
    CHECK(located.batch.group_by_owner(99).empty());
  }
}

}  // namespace
