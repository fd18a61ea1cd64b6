// What engines say that they find counts for a while, and together, and one of them keeps no other out.
#include <vector>

#include "attach/engine_finds.h"
#include "check.h"
#include "keys.h"

namespace {

using p2pkv::Key;
using p2pkv::attaching::EngineFinds;
using p2pkv::attaching::Finds;
using p2pkv::test::key_of;

int64_t now_ns = 0;

void say(EngineFinds& finds, uint64_t engine, uint64_t first, size_t n, uint64_t in_1000_s) {
  std::vector<Key> keys;
  for (size_t i = 0; i < n; ++i) keys.push_back(key_of(first + i));
  finds.take(engine, keys, std::vector<Finds>(n, Finds{in_1000_s, 9, 0}));
}

TEST(engine_finds_count_until_the_engine_says_others_or_nothing_any_more) {
  EngineFinds finds([] { return now_ns; });
  say(finds, 1, 10, 2, 1000);
  say(finds, 1, 20, 1, 1000);
  CHECK_EQ(finds.list(0, 100).size(), size_t{1});
  CHECK(finds.list(0, 100)[0].pages[0].key == key_of(20));
  now_ns += EngineFinds::kLastsNs;
  CHECK_EQ(finds.list(0, 100).size(), size_t{1});
  now_ns += 1;
  CHECK(finds.list(0, 100).empty());
}

TEST(engine_finds_are_those_of_all_engines_together) {
  EngineFinds finds([] { return now_ns; });
  for (uint64_t engine = 1; engine <= 3; ++engine) say(finds, engine, 10, 1, 200);
  say(finds, 4, 11, 1, 200);
  const auto all = finds.list(0.5, 100);
  CHECK_EQ(all.size(), size_t{3});
  for (const auto& one : all) CHECK(one.pages.size() == 1 && one.pages[0].key == key_of(10));
}

TEST(engine_finds_of_one_leave_room_for_those_of_others) {
  EngineFinds finds([] { return now_ns; });
  say(finds, 1, 1000, 2000, ~uint64_t{0});  // however much it claims
  say(finds, 2, 10, 20, 500);
  const auto all = finds.list(0.25, 100);
  CHECK_EQ(all.size(), size_t{2});
  CHECK(all[0].pages.size() >= 80 && all[0].pages.size() <= 81);
  CHECK_EQ(all[1].pages.size(), size_t{20});
}

}  // namespace
