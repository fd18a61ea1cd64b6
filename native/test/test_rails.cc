// Which rail a slice takes and how many streams a batch takes, without any network: times and bandwidths are
// made up here.
#include <algorithm>
#include <cstdint>
#include <numeric>

#include "check.h"
#include "transports/batch.h"
#include "transports/rails.h"
#include "transports/stream_count.h"

using namespace p2pkv;

namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr RailSet kBoth = {true, true};
const Rails::Time kStart{};

Rails::Time at(double seconds) {
  return kStart + std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

// Has a rail carry a MiB with a bandwidth, alone.
void carry(Rails& rails, size_t rail, double bytes_a_second) {
  RailSet only{};
  only[rail] = true;
  rails.assign({kMiB}, only);
  rails.arrived(rail, kMiB, kMiB, kMiB / bytes_a_second);
}

// The simulated time that a batch takes whose slices are assigned now.
double batch_seconds(Rails& rails, const std::vector<uint64_t>& slices, const std::vector<double>& speeds) {
  std::vector<uint64_t> given(speeds.size());
  const auto chosen = rails.assign(slices, kBoth);
  for (size_t i = 0; i < slices.size(); ++i) given[chosen[i]] += slices[i];
  double longest = 0;
  for (size_t rail = 0; rail < speeds.size(); ++rail) {
    const double seconds = static_cast<double>(given[rail]) / speeds[rail];
    if (given[rail] > 0) rails.arrived(rail, given[rail], given[rail], seconds);
    longest = std::max(longest, seconds);
  }
  return longest;
}

// The seconds a byte of batches over n streams that a machine takes on which each of the first `n_paying`
// brings as much as the first.
double ns_per_byte(size_t n, size_t n_paying) {
  return 1.0 / static_cast<double>(std::min(n, n_paying));
}

size_t settled_streams(StreamCount& streams, size_t n_paying) {
  for (int batch = 0; batch < 20000; ++batch) {
    const size_t n = streams.next(streams.to_open());
    streams.took(n, ns_per_byte(n, n_paying));
  }
  return streams.in_use();
}

}  // namespace

TEST(rails_share_by_predicted_completion) {
  Rails rails(2);
  const std::vector<uint64_t> slices(400, 64 << 10);
  for (int batch = 0; batch < 20; ++batch) batch_seconds(rails, slices, {9e9, 3e9});
  const double seconds = batch_seconds(rails, slices, {9e9, 3e9});
  const double ideal = 400.0 * (64 << 10) / 12e9;
  CHECK(seconds < 1.1 * ideal);
  CHECK_EQ(rails.n_bytes_in_flight(0) + rails.n_bytes_in_flight(1), uint64_t{0});
}

TEST(rails_follow_a_rail_that_becomes_slow) {
  Rails rails(2);
  const std::vector<uint64_t> slices(400, 64 << 10);
  for (int batch = 0; batch < 20; ++batch) batch_seconds(rails, slices, {5e9, 5e9});
  for (int batch = 0; batch < 20; ++batch) batch_seconds(rails, slices, {5e9, 1e8});
  CHECK(batch_seconds(rails, slices, {5e9, 1e8}) < 1.2 * 400.0 * (64 << 10) / 5.1e9);
}

TEST(rails_count_what_is_on_its_way) {
  Rails rails(2);
  carry(rails, 0, 2e9);
  carry(rails, 1, 1e9);
  CHECK_EQ(rails.assign({8 * kMiB}, kBoth)[0], size_t{0});  // 4 ms
  CHECK_EQ(rails.assign({kMiB}, kBoth)[0], size_t{1});      // 1 ms against 4.5
  CHECK_EQ(rails.n_bytes_in_flight(0), 8 * kMiB);
  rails.gave_up(0, 8 * kMiB, 0, 1);
  CHECK_EQ(rails.assign({kMiB}, kBoth)[0], size_t{0});
}

TEST(rails_probe_a_rail_that_was_bad_once_in_a_hundred_batches) {
  Rails rails(2);
  carry(rails, 0, 1e9);
  carry(rails, 1, 1e3);
  int n_probes = 0;
  for (int batch = 0; batch < 1000; ++batch) {
    const auto chosen = rails.assign({64 << 10, 64 << 10}, kBoth);
    const auto n = std::count(chosen.begin(), chosen.end(), size_t{1});
    CHECK(n <= 1);
    n_probes += static_cast<int>(n);
    for (const size_t rail : chosen) rails.arrived(rail, 64 << 10, 64 << 10, rail == 0 ? 64e-6 : 64);
  }
  CHECK_EQ(n_probes, 10);
}

TEST(rails_take_none_that_is_not_usable) {
  Rails rails(3);
  for (int batch = 0; batch < 300; ++batch) {
    for (const size_t rail : rails.assign({kMiB, kMiB}, {false, true, false})) CHECK_EQ(rail, size_t{1});
  }
}

TEST(rails_pause_twice_as_long_after_each_failure) {
  Rails rails(2);
  CHECK(!rails.is_doubted(1));
  double now = 100;
  for (const double pause : {1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0}) {
    rails.failed(1, at(now));
    rails.failed(1, at(now + 0.01));  // another endpoint found the same
    CHECK(rails.retry_at(1) == at(now + pause));
    rails.proved(1, at(now + pause / 2));
    CHECK(rails.is_doubted(1));  // too soon
    now += pause;
  }
  rails.proved(1, at(now));
  CHECK(!rails.is_doubted(1));
  rails.failed(1, at(now + 5));  // it has not been sound for long
  CHECK(rails.retry_at(1) == at(now + 35));
  rails.proved(1, at(now + 35));
  rails.failed(1, at(now + 100));
  CHECK(rails.retry_at(1) == at(now + 101));
}

TEST(rails_are_patient_on_a_busy_machine_and_forget_it) {
  Rails rails(2);
  CHECK(rails.patience(0) == 0.010);
  rails.heard_again(0, 0.02);
  CHECK(rails.patience(0) == 0.040);
  rails.heard_again(0, 1.0);
  CHECK(rails.patience(0) == 0.100);
  for (int share = 0; share < 60; ++share) rails.arrived(0, 1, 1, 0.001);
  CHECK(rails.patience(0) < 0.015);
}

TEST(streams_are_as_many_as_pay) {
  for (const size_t n_paying : {1, 2, 3, 4, 8}) {
    StreamCount streams(4);
    CHECK_EQ(settled_streams(streams, n_paying), std::min<size_t>(n_paying, 4));
  }
  StreamCount streams(4);
  CHECK_EQ(settled_streams(streams, 4), size_t{4});
  CHECK_EQ(settled_streams(streams, 1), size_t{1});  // what else runs has changed
  CHECK_EQ(settled_streams(streams, 3), size_t{3});
}

TEST(streams_that_bring_little_are_not_kept) {
  StreamCount streams(4, 1);
  for (int batch = 0; batch < 20000; ++batch) {
    const size_t n = streams.next(streams.to_open());
    streams.took(n, n == 1 ? 1.0 : 0.95);
  }
  CHECK_EQ(streams.in_use(), size_t{1});
}

TEST(slices_never_part_a_page) {
  // pages of three pieces, each with the page's word
  std::vector<Span> spans;
  std::vector<Word> words;
  for (int64_t i = 0; i < 30; ++i) {
    spans.push_back({i * 4096, i * 4096, 4096});
    words.push_back({static_cast<uint64_t>(i / 3) * 8, 2});
  }
  std::vector<uint32_t> list(spans.size());
  std::iota(list.begin(), list.end(), 0);
  for (const uint64_t nbytes : {0ul, 4096ul, 5000ul, 16384ul, 1000000ul}) {
    size_t next = 0;
    for (const Slice& slice : cut_slices(spans, words, list, nbytes)) {
      CHECK_EQ(slice.first, next);
      CHECK_EQ(slice.first % 3, size_t{0});
      CHECK_EQ(slice.nbytes, (slice.end - slice.first) * 4096);
      next = slice.end;
    }
    CHECK_EQ(next, list.size());
  }
  for (size_t n_shares = 1; n_shares < 12; ++n_shares) {
    const auto shares = split_list(spans, words, list, n_shares);
    CHECK_EQ(shares.size(), std::min<size_t>(n_shares, 10));
    uint32_t next = 0;
    for (const Share& share : shares) {
      CHECK(!share.spans.empty());
      CHECK_EQ(share.spans.front() % 3, uint32_t{0});
      for (const uint32_t span : share.spans) CHECK_EQ(span, next++);
    }
    CHECK_EQ(next, uint32_t{30});
  }
}
