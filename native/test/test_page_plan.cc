#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "keys.h"
#include "p2pkv/page_plan.h"
#include "seed.h"

namespace {

using p2pkv::Key;
using p2pkv::Location;
using p2pkv::Piece;
using p2pkv::Registered;
using p2pkv::test::key_of;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

struct Located {
  std::vector<int32_t> region_of;
  std::vector<int64_t> length_of;
};

Located locate(const std::vector<Piece>& pieces, size_t n_pieces, const std::vector<Registered>& regions) {
  Located out{std::vector<int32_t>(pieces.size()), std::vector<int64_t>(pieces.size() / n_pieces)};
  p2pkv::locate_pieces(pieces.data(), pieces.size() / n_pieces, n_pieces, regions, out.region_of.data(),
                       out.length_of.data());
  return out;
}

TEST(page_plan_finds_the_first_duplicate) {
  std::vector<Key> keys;
  for (uint64_t name = 0; name < 5000; ++name) keys.push_back(key_of(name));
  CHECK(!p2pkv::find_duplicate(keys.data(), keys.size()));
  CHECK(!p2pkv::find_duplicate(nullptr, 0));
  keys[4000] = keys[17];
  keys[4500] = keys[3];
  CHECK_EQ(p2pkv::find_duplicate(keys.data(), keys.size()).value_or(0), 4000u);
}

TEST(page_plan_tells_keys_apart_that_share_their_hash) {
  std::vector<Key> keys(300, key_of(1));
  for (size_t i = 0; i < keys.size(); ++i) keys[i].bytes[8 + i % 8] = static_cast<uint8_t>(1 + i / 8);
  CHECK(!p2pkv::find_duplicate(keys.data(), keys.size()));
}

TEST(page_plan_locates_a_piece_only_where_all_of_it_is_registered) {
  const std::vector<Registered> regions{{1000, 100}, {1100, 50}, {5000, 10}};
  const std::vector<Piece> pieces{{1000, 100}, {999, 10}, {1099, 1}, {1099, 2}, {1100, 50}, {1100, 51},
                                  {5009, 1},   {5010, 1}, {0, 1},    {-5, 10},  {kMax, 1},  {1000, kMax}};
  const Located out = locate(pieces, 1, regions);
  const std::vector<int32_t> expected{0, -1, 0, -1, 1, -1, 2, -1, -1, -1, -1, -1};
  for (size_t i = 0; i < expected.size(); ++i) CHECK_EQ(out.region_of[i], expected[i]);
  CHECK_EQ(locate({{1, 1}}, 1, {}).region_of[0], -1);
}

TEST(page_plan_refuses_lengths_that_are_none) {
  const std::vector<Registered> regions{{0, kMax}};
  const std::vector<Piece> pieces{{1, 5}, {1, 6},    {1, 0}, {1, 6}, {1, -1},
                                  {1, 6}, {1, kMax}, {1, 1}, {1, 6}, {1, 0}};
  const Located out = locate(pieces, 2, regions);
  const std::vector<int64_t> expected{11, -1, -1, -1, -1};
  for (size_t i = 0; i < expected.size(); ++i) CHECK_EQ(out.length_of[i], expected[i]);
}

TEST(page_plan_covers_each_piece_once_whatever_the_split) {
  std::mt19937_64 random(p2pkv::test::seed("page_plan_covers_each_piece_once"));
  for (int round = 0; round < 200; ++round) {
    const size_t n_pages = 1 + random() % 20;
    const size_t n_pieces = 1 + random() % 5;
    const std::vector<Registered> regions{{1 << 20, 1 << 19}, {1 << 22, 1 << 19}, {1 << 24, 1 << 19}};
    std::vector<Piece> pieces;
    for (size_t i = 0; i < n_pages * n_pieces; ++i) {
      const auto nbytes = static_cast<int64_t>(1 + random() % 1000);
      pieces.push_back({regions[random() % 3].address + static_cast<int64_t>(random() % 100'000), nbytes});
    }
    const Located located = locate(pieces, n_pieces, regions);
    std::vector<Location> locations(n_pages);
    for (size_t i = 0; i < n_pages; ++i) locations[i].offset = i << 16, locations[i].generation = i * 2;
    std::vector<int64_t> rows;
    for (size_t i = 0; i < n_pages; ++i) {
      if (random() % 3 != 0) rows.push_back(static_cast<int64_t>(i));
    }
    std::set<int64_t> seen;
    for (int32_t region = 0; region < 3; ++region) {
      const auto plan = p2pkv::plan_reads(pieces.data(), located.region_of.data(), n_pieces, locations.data(),
                                          rows, region, regions[static_cast<size_t>(region)].address);
      for (size_t i = 0; i < plan.spans.size(); ++i) {
        CHECK(seen.insert(plan.indexes[i]).second);
        const auto row = static_cast<size_t>(rows[static_cast<size_t>(plan.indexes[i]) / n_pieces]);
        const size_t nth = static_cast<size_t>(plan.indexes[i]) % n_pieces;
        auto remote = static_cast<int64_t>(row << 16);
        for (size_t before = 0; before < nth; ++before) remote += pieces[row * n_pieces + before].nbytes;
        const Piece& piece = pieces[row * n_pieces + nth];
        CHECK_EQ(plan.spans[i].local + regions[static_cast<size_t>(region)].address, piece.address);
        CHECK_EQ(plan.spans[i].remote, remote);
        CHECK_EQ(plan.spans[i].length, piece.nbytes);
        CHECK_EQ(plan.words[i].value, row * 2);
      }
    }
    CHECK_EQ(seen.size(), rows.size() * n_pieces);
  }
}

TEST(page_plan_survives_a_location_beyond_all_memory) {
  // Locations come off the wire; the transport refuses such a span, but computing it must be sound.
  const std::vector<Piece> pieces{{16, 8}, {32, 8}};
  const std::vector<int32_t> region_of{0, 0};
  for (const uint64_t offset : {uint64_t(kMax), uint64_t(kMax) - 4, ~uint64_t{0}, uint64_t(1) << 63}) {
    Location location{};
    location.offset = offset;
    const auto plan = p2pkv::plan_reads(pieces.data(), region_of.data(), 2, &location, {0}, 0, 0);
    CHECK_EQ(plan.spans.size(), 2u);
    CHECK_EQ(static_cast<uint64_t>(plan.spans[1].remote), offset + 8);
  }
}

}  // namespace
