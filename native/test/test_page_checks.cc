#include <cstdint>
#include <limits>
#include <vector>

#include "check.h"
#include "keys.h"
#include "page/page_checks.h"

namespace {

using p2pkv::Key;
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

TEST(page_checks_finds_the_first_duplicate) {
  std::vector<Key> keys;
  for (uint64_t name = 0; name < 5000; ++name) keys.push_back(key_of(name));
  CHECK(!p2pkv::find_duplicate(keys.data(), keys.size()));
  CHECK(!p2pkv::find_duplicate(nullptr, 0));
  keys[4000] = keys[17];
  keys[4500] = keys[3];
  CHECK_EQ(p2pkv::find_duplicate(keys.data(), keys.size()).value_or(0), 4000u);
}

TEST(page_checks_tells_keys_apart_that_share_their_hash) {
  std::vector<Key> keys(300, key_of(1));
  for (size_t i = 0; i < keys.size(); ++i) keys[i].bytes[8 + i % 8] = static_cast<uint8_t>(1 + i / 8);
  CHECK(!p2pkv::find_duplicate(keys.data(), keys.size()));
}

TEST(page_checks_locates_a_piece_only_where_all_of_it_is_registered) {
  const std::vector<Registered> regions{{1000, 100}, {1100, 50}, {5000, 10}};
  const std::vector<Piece> pieces{{1000, 100}, {999, 10}, {1099, 1}, {1099, 2}, {1100, 50}, {1100, 51},
                                  {5009, 1},   {5010, 1}, {0, 1},    {-5, 10},  {kMax, 1},  {1000, kMax}};
  const Located out = locate(pieces, 1, regions);
  const std::vector<int32_t> expected{0, -1, 0, -1, 1, -1, 2, -1, -1, -1, -1, -1};
  for (size_t i = 0; i < expected.size(); ++i) CHECK_EQ(out.region_of[i], expected[i]);
  CHECK_EQ(locate({{1, 1}}, 1, {}).region_of[0], -1);
}

TEST(page_checks_refuses_lengths_that_are_none) {
  const std::vector<Registered> regions{{0, kMax}};
  const std::vector<Piece> pieces{{1, 5}, {1, 6},    {1, 0}, {1, 6}, {1, -1},
                                  {1, 6}, {1, kMax}, {1, 1}, {1, 6}, {1, 0}};
  const Located out = locate(pieces, 2, regions);
  const std::vector<int64_t> expected{11, -1, -1, -1, -1};
  for (size_t i = 0; i < expected.size(); ++i) CHECK_EQ(out.length_of[i], expected[i]);
}

}  // namespace
