// Rows that come to a device in rounds: while one is copied the next one is read, no further, and each within
// room of its own.
#include <functional>

#include "cuda/staging.h"
#include "device_transfer_pair.h"

namespace {

static_assert(p2pkv::cuda::Staging::kGranule == kRowBytes);

// Of rows in host memory, so that all copies are the consumer's. A round is of a quarter of the staging.
Setting in_rounds_of(uint64_t n_rows, Over over) {
  Setting setting;
  setting.over = over;
  setting.from = On::kHost;
  setting.staging_nbytes = 4 * n_rows * kRowBytes;
  return setting;
}

// Nothing is waited for in a test that has failed already: what follows would not come either.
bool becomes(const std::function<bool()>& condition) {
  const auto until = Deadline::after(p2pkv::test::failures == 0 ? kLong : 0.0);
  while (!until.passed()) {
    if (condition()) return true;
    std::this_thread::yield();
  }
  return false;
}

uint64_t used(const Pair& pair) {
  return pair.consumer.reading("p2pkv_incoming_staging_used_bytes");
}

// One row of many granules, so that a round has a part of it.
p2pkv::Rows one_row(const Party& party, const std::string& request, size_t n_granules) {
  p2pkv::Rows rows{request, 0, {}};
  rows.spans.push_back({static_cast<int64_t>(party.address), static_cast<int64_t>(n_granules * kRowBytes)});
  return rows;
}

}  // namespace

TEST(received_rounds_the_next_is_read_while_one_is_copied_and_no_further) {
  constexpr uint32_t kRows = 24, kRound = 2;
  for (const Over over : {Over::kTcp, Over::kShm}) {
    Pair pair(kRows, in_rounds_of(kRound, over));
    const FakeCuda& fake = pair.consumer.fake;
    fake.hold(1, 0);
    const int64_t before = fake.counts().copies_to_device;
    const auto grant = pair.grant("rounds", kRows);
    const auto offer = pair.put("rounds", kRows);
    for (int64_t round = 1; round <= kRows / kRound; ++round) {
      // The round's copy is held, and the next one has room already.
      CHECK(becomes([&] { return fake.counts().copies_to_device - before == round; }));
      if (round < kRows / kRound) CHECK(becomes([&] { return used(pair) == 2 * kRound * kRowBytes; }));
      CHECK_EQ(fake.counts().queued, 1);
      fake.let_through(1);
    }
    fake.hold(0, 0);
    CHECK(all_are(wait(grant), RowStatus::kOk));
    CHECK(all_are(wait(offer), RowStatus::kOk));
    CHECK(pair.is_right(kRows));
    CHECK(pair.has_all_staging());
  }
}

TEST(received_rounds_have_no_more_than_one_round_of_copies_under_way) {
  constexpr uint32_t kRows = 24;
  Pair pair(kRows, in_rounds_of(2, Over::kShm));
  const FakeCuda& fake = pair.consumer.fake;
  fake.delay_copies(1000);  // longer than a round is read for
  fake.hold(1, 0);  // until one has been seen: all of them may pass while this thread waits for a core
  const auto grant = pair.grant("rounds", kRows);
  const auto offer = pair.put("rounds", kRows);
  int64_t most = 0;
  const auto look = [&] { most = std::max(most, fake.counts().queued); };
  CHECK(becomes([&] { return fake.counts().queued > 0 && used(pair) == 4 * kRowBytes; }));
  // Whoever begins the next round's copies without waiting has read it, and done so, by then.
  for (const auto until = Deadline::after(0.002); !until.passed();) look();
  fake.hold(0, 0);
  while (!grant->done()) look();
  CHECK(all_are(wait(grant), RowStatus::kOk));
  CHECK_EQ(most, 1);
  CHECK(pair.is_right(kRows));
}

TEST(received_rounds_of_several_requests_never_share_room) {
  constexpr uint32_t kRows = 8;
  for (int turn = 0; turn < 4; ++turn) {
    Setting setting = in_rounds_of(1, Over::kShm);
    setting.staging_nbytes = 3 * kRowBytes;  // two requests want two rounds' room each
    Pair pair(2 * kRows, setting);
    const FakeCuda& fake = pair.consumer.fake;
    fake.hold(1, 0);
    const std::shared_ptr<Grant> grants[] = {pair.grant("first", kRows), pair.grant("second", kRows, kRows)};
    const auto first = pair.put("first", kRows);
    CHECK(becomes([&] { return fake.counts().queued == 1 && used(pair) == 2 * kRowBytes; }));
    const auto second = pair.put("second", kRows, kRows);
    CHECK(becomes([&] { return fake.counts().queued == 2 && used(pair) == 3 * kRowBytes; }));
    spin(std::chrono::milliseconds(2));  // who took room that is copied from would have read into it by now
    fake.hold(0, 0);
    for (const auto& grant : grants) CHECK(all_are(wait(grant), RowStatus::kOk));
    CHECK(pair.is_right(2 * kRows));
    CHECK(pair.has_all_staging());
  }
}

TEST(received_rounds_of_one_long_row_are_all_there_or_the_row_is_not) {
  constexpr uint32_t kGranules = 8;
  Pair pair(kGranules, in_rounds_of(1, Over::kTcp));
  const FakeCuda& fake = pair.consumer.fake;
  for (int failing = 0; failing <= static_cast<int>(kGranules); ++failing) {
    const std::string request = "row " + std::to_string(failing);
    pair.consumer.fill(0, 0, kGranules);
    if (failing > 0) fake.fail("cuMemcpyHtoDAsync", failing, 1, 0);
    const auto grant = pair.granted(std::nullopt, one_row(pair.consumer, request, kGranules), kLong);
    const auto offer = pair.offered(pair.producer.transfers->offer(
        2, one_row(pair.producer, request, kGranules), Deadline::after(kLong), &pair.producer.error));
    const RowStatus expected = failing > 0 ? RowStatus::kDeviceFailed : RowStatus::kOk;
    CHECK(all_are(wait(grant), expected));
    CHECK(all_are(wait(offer), expected));
    if (failing == 0) CHECK(pair.is_right(kGranules));
  }
  CHECK(pair.has_all_staging());
}
