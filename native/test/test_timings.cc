#include <cstdint>
#include <numeric>
#include <thread>
#include <vector>

#include "base/timings.h"
#include "check.h"

namespace {

using p2pkv::Timings;

TEST(timings_count_by_label_size_and_time) {
  Timings timings(2, {100, 1000});
  timings.add(1, 100, 10'000);  // as long as the first bound, as large as the first class
  timings.add(1, 101, 10'001);
  timings.add(1, 5000, int64_t{3'000'000'000});
  const auto readings = timings.read();
  CHECK_EQ(readings.size(), 6u);
  CHECK_EQ(readings[3].counts[0], 1u);
  CHECK_EQ(readings[4].counts[1], 1u);
  CHECK_EQ(readings[5].counts[Timings::kBounds.size()], 1u);
  CHECK_EQ(readings[5].sum_ns, 3'000'000'000u);
  for (size_t i = 0; i < 3; ++i) CHECK_EQ(readings[i].sum_ns, 0u);
}

TEST(timings_lose_nothing_that_threads_add_at_once) {
  Timings timings(1, {1});
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int64_t k = 0; k < 10'000; ++k) timings.add(0, 1, k);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto reading = timings.read().front();
  CHECK_EQ(std::accumulate(reading.counts.begin(), reading.counts.end(), uint64_t{0}), 40'000u);
  CHECK_EQ(reading.sum_ns, 4u * (9'999u * 10'000u / 2));
}

}  // namespace
