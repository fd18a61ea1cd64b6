// Sorting by number, as std::stable_sort does.
#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "base/radix_sort.h"
#include "check.h"
#include "seed.h"

namespace {

using Things = std::vector<std::pair<uint64_t, uint32_t>>;

TEST(radix_sort_sorts_by_number_and_leaves_those_with_the_same_in_their_order) {
  std::mt19937_64 random(p2pkv::test::seed("radix_sort"));
  for (const int bits : {0, 1, 10, 11, 12, 22, 33, 48, 63, 64}) {
    for (const size_t n : {size_t{0}, size_t{1}, size_t{2}, size_t{1000}, size_t{5000}}) {
      const uint64_t least = bits < 64 ? random() >> 1 : 0;
      Things things;
      for (uint32_t i = 0; i < n; ++i)
        things.emplace_back(least + (bits == 0 ? 0 : random() >> (64 - bits)), i);
      Things sorted = things;
      std::stable_sort(sorted.begin(), sorted.end(),
                       [](const auto& a, const auto& b) { return a.first < b.first; });
      p2pkv::radix_sort(&things);
      CHECK(things == sorted);
    }
  }
}

}  // namespace
