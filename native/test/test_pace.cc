// When a read from a peer is late.
#include <chrono>
#include <cstdint>
#include <random>

#include "check.h"
#include "peers/pace.h"
#include "seed.h"

namespace {

using p2pkv::Pace;
using std::chrono::microseconds;
using std::chrono::milliseconds;

TEST(pace_guesses_until_it_has_seen_some_reads) {
  Pace pace;
  CHECK(pace.late_after(1 << 20) >= milliseconds(20));
  for (int i = 0; i < 8; ++i) pace.note(1 << 20, milliseconds(3));
  CHECK(pace.late_after(1 << 20) == milliseconds(6));
  CHECK(pace.late_after(1 << 26) >= milliseconds(600));  // of other sizes it knows nothing
  CHECK(pace.late_connecting() >= milliseconds(20));
}

TEST(pace_is_late_for_few_reads_whatever_the_network_is_like) {
  std::mt19937_64 random(p2pkv::test::seed("pace"));
  Pace pace;
  for (const int64_t typical_us : {2000, 40000, 5000}) {
    std::lognormal_distribution<double> noise(0, 0.5);
    int n_late = 0;
    for (int i = 0; i < 6000; ++i) {
      const auto took = microseconds(static_cast<int64_t>(static_cast<double>(typical_us) * noise(random)));
      if (i >= 3000) n_late += took > pace.late_after(1 << 16) ? 1 : 0;
      pace.note(1 << 16, took);
    }
    CHECK(n_late < 3000 / 50);
    CHECK(pace.late_after(1 << 16) < microseconds(20 * typical_us));
  }
}

TEST(pace_is_not_told_by_a_peer_that_stood_still_what_a_read_takes) {
  Pace fresh, known;
  fresh.note(1 << 14, milliseconds(1000));
  CHECK(fresh.late_after(1 << 14) < milliseconds(60));
  for (int i = 0; i < 10; ++i) known.note(1 << 14, microseconds(200));
  for (int i = 0; i < 4; ++i) known.note(1 << 14, milliseconds(1000));
  CHECK(known.late_after(1 << 14) < milliseconds(10));
  for (int i = 0; i < 40; ++i) known.note(1 << 14, milliseconds(500));  // it has got slower
  CHECK(known.late_after(1 << 14) > milliseconds(500));
}

TEST(pace_knows_what_reads_take_as_a_rule) {
  Pace pace;
  const auto usual = [&] { return std::chrono::nanoseconds(pace.usual(1 << 16).most_ns); };
  for (int i = 0; i < 7; ++i) pace.note(1 << 16, milliseconds(3));
  CHECK(usual().count() == 0);  // too few have told
  for (int i = 0; i < 20; ++i) pace.note(1 << 16, milliseconds(3));
  CHECK(usual() > microseconds(2500) && usual() < microseconds(3500));
  CHECK_EQ(pace.usual(1 << 16).least_ns, pace.usual(1 << 16).most_ns);
  pace.note(1 << 16, milliseconds(5000));  // it stood still once
  CHECK(usual() < milliseconds(4));
  for (int i = 0; i < 30; ++i) pace.note(1 << 16, milliseconds(50));
  CHECK(usual() > milliseconds(40) && usual() < milliseconds(60));
  for (int i = 0; i < 60; ++i) pace.note(1 << 16, milliseconds(3));
  CHECK(usual() < milliseconds(4));
}

TEST(pace_knows_between_what_reads_of_other_sizes_take) {
  Pace pace;
  for (int i = 0; i < 100; ++i) pace.note_connected(milliseconds(100));  // which is no size
  CHECK_EQ(pace.usual(1 << 16).most_ns, 0);
  for (int i = 0; i < 8; ++i) pace.note(1 << 16, milliseconds(8));
  CHECK_EQ(pace.usual(1 << 13).least_ns, 1'000'000);
  CHECK_EQ(pace.usual(1 << 13).most_ns, 8'000'000);
  CHECK_EQ(pace.usual(1 << 18).least_ns, 8'000'000);
  CHECK_EQ(pace.usual(1 << 18).most_ns, 32'000'000);
  CHECK_EQ(pace.usual(1).least_ns, 122);
  CHECK(pace.usual(uint64_t{1} << 60).most_ns > int64_t{1} << 60);
  for (int i = 0; i < 8; ++i) pace.note(1 << 14, milliseconds(1));
  CHECK_EQ(pace.usual(1 << 13).most_ns, 1'000'000);  // by what is nearer
}

TEST(pace_tells_what_is_guessed_from_what_most_take) {
  Pace pace;
  CHECK(pace.patience(1 << 10).most == milliseconds(0));
  for (int i = 0; i < 8; ++i) pace.note(1 << 10, milliseconds(3));
  CHECK(pace.patience(1 << 10).most == milliseconds(3));
  CHECK(pace.patience(1 << 10).late == milliseconds(6));
}

TEST(pace_knows_a_late_peer_until_it_is_in_time) {
  Pace pace;
  CHECK(!pace.is_slow());
  pace.was_late();
  CHECK(pace.is_slow());
  pace.was_in_time();
  CHECK(!pace.is_slow());
}

}  // namespace
