// Which rows were offered and are no more: against a model, and within their bounds.
#include <set>
#include <string>

#include "check.h"
#include "numbers.h"
#include "offers/gone_rows.h"
#include "seed.h"

using p2pkv::offers::GoneRows;
using p2pkv::offers::RowRange;

TEST(gone_rows_are_exactly_those_that_were_added) {
  p2pkv::test::Numbers numbers(p2pkv::test::seed("gone rows"));
  for (int round = 0; round < 200; ++round) {
    GoneRows gone(60.0);
    std::set<uint32_t> model;
    for (int i = 0; i < 40; ++i) {
      const auto first = static_cast<uint32_t>(numbers.below(200));
      const auto end = first + 1 + static_cast<uint32_t>(numbers.below(12));
      gone.add("it", {first, end});
      for (uint32_t row = first; row < end; ++row) model.insert(row);
      const auto asked = static_cast<uint32_t>(numbers.below(200));
      const RowRange question{asked, asked + 1 + static_cast<uint32_t>(numbers.below(60))};
      std::set<uint32_t> found;
      for (const RowRange& rows : gone.among("it", question)) {
        for (uint32_t row = rows.first; row < rows.end; ++row) CHECK(found.insert(row).second);
      }
      CHECK(found == std::set<uint32_t>(model.lower_bound(question.first), model.lower_bound(question.end)));
    }
    CHECK(gone.among("another", {0, 300}).empty());
  }
}

TEST(gone_rows_are_bounded_and_the_oldest_go_first) {
  GoneRows gone(60.0);
  const size_t n_names = GoneRows::kMaxRanges + 1000;
  for (size_t i = 0; i < n_names; ++i) gone.add(std::to_string(i), {0, 4});
  CHECK_EQ(gone.n_ranges(), GoneRows::kMaxRanges);
  CHECK(gone.among("999", {0, 4}).empty());
  CHECK_EQ(gone.among("1000", {0, 4}).size(), size_t{1});
  // One name alone may not have more either.
  for (uint32_t i = 0; i <= GoneRows::kMaxRanges; ++i) gone.add("apart", {2 * i, 2 * i + 1});
  CHECK(gone.n_ranges() <= GoneRows::kMaxRanges);
}

TEST(gone_rows_are_forgotten_in_time) {
  GoneRows gone(0.0);
  gone.add("it", {0, 4});
  gone.tick();
  CHECK_EQ(gone.n_ranges(), size_t{0});
}
