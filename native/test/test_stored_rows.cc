// Rows that came before their grant: calls that copy them end by their deadline, and closed memory is not
// written to.
#include <cstring>

#include "device_transfer_pair.h"

namespace {

constexpr size_t kMany = 1024;  // 64 MiB: no processor copies them in a millisecond
constexpr double kBlink = 0.001;

Setting stored(On to) {
  Setting setting;
  setting.from = On::kHost;
  setting.to = to;
  setting.buffer_nbytes = 64 << 20;
  return setting;
}

// Rows that wait in the receive buffer.
void store(Pair& pair, size_t n) {
  const auto offer = pair.put("stored", n);
  CHECK(all_are(wait(offer), RowStatus::kOk));
}

}  // namespace

TEST(stored_rows_are_copied_until_the_deadline_and_no_longer) {
  Pair pair(kMany, stored(On::kHost));
  store(pair, kMany);
  const auto late = pair.grant("stored", kMany, 0, kBlink);
  late->wait(Deadline::after(kLong));
  const RowStatuses statuses = late->statuses();
  CHECK(statuses.back() == RowStatus::kTimedOut);
  const auto first_left = std::find(statuses.begin(), statuses.end(), RowStatus::kTimedOut);
  const auto n_taken = static_cast<uint32_t>(first_left - statuses.begin());
  CHECK(std::all_of(first_left, statuses.end(), [](RowStatus s) { return s == RowStatus::kTimedOut; }));
  // What it did not get is there for the next one, which goes on from call to call.
  const auto grant = pair.grant("stored", kMany - n_taken, n_taken);
  while (!grant->done()) grant->wait(Deadline::after(kBlink));
  CHECK(all_are(grant->statuses(), RowStatus::kOk));
  CHECK(pair.is_right(kMany));
}

TEST(stored_rows_whose_stream_is_busy_hold_up_no_call) {
  constexpr size_t kFew = 8;
  Pair pair(kFew, stored(On::kDevice));
  store(pair, kFew);
  const FakeCuda& fake = pair.consumer.fake;
  const uint64_t stream = fake.stream(0);
  fake.hold(false, true);
  CHECK_EQ(fake.launch_fill(stream, pair.consumer.address, 7, kRowBytes, 0), 0);
  auto rows = pair.consumer.rows("stored", kFew);
  rows.stream = stream;
  // Each of these waited for the stream until the grant's deadline.
  const auto grant = pair.granted(std::nullopt, rows, kLong);
  CHECK(!grant->done());
  CHECK(all_are(grant->statuses(), RowStatus::kPending));
  grant->wait(Deadline::after(kBlink));
  CHECK(all_are(grant->statuses(), RowStatus::kPending));
  fake.hold(false, false);
  CHECK(all_are(wait(grant), RowStatus::kOk));
  CHECK(pair.is_right(kFew));
}

TEST(stored_rows_are_not_copied_into_closed_memory) {
  constexpr size_t kFew = 8;
  Pair pair(kFew, stored(On::kDevice));
  store(pair, kFew);
  const FakeCuda& fake = pair.consumer.fake;
  fake.hold(true, false);
  std::shared_ptr<Grant> grant;
  std::thread copying([&] {
    grant = pair.grant("stored", kFew, 0, 3);  // on a busy machine its copies are begun late
    grant->wait(Deadline::after(kLong));       // the producer may know a moment before that they are stored
  });
  // The copy is under way, and the grant is closed at its deadline.
  for (const auto until = Deadline::after(kLong); fake.counts().queued == 0 && !until.passed();)
    std::this_thread::yield();
  CHECK(fake.counts().queued > 0);
  while (pair.consumer.reading("p2pkv_open_grants") > 0) std::this_thread::yield();
  std::atomic<bool> is_closed = false;
  std::thread closing([&] {
    pair.consumer.transfers->remove_memory(pair.consumer.memory);
    is_closed = true;
  });
  // Long enough for a thread that waits for nothing.
  const auto until = Deadline::after(0.2);
  while (!until.passed() && !is_closed) std::this_thread::yield();
  CHECK(!is_closed);
  fake.hold(false, false);
  closing.join();
  pair.consumer.fill(0xca9a47, 0, kFew);
  copying.join();
  for (size_t row = 0; row < kFew; ++row) CHECK(pair.consumer.holds(0xca9a47, row));
}

TEST(grants_and_offers_that_find_their_memory_closed_do_nothing) {
  Moments moments(p2pkv::test::seed("closings"), std::chrono::microseconds(500));
  for (int turn = 0; turn < (kIsSanitized ? 10 : 150); ++turn) {
    Pair pair(4, stored(On::kHost));
    store(pair, 4);
    std::atomic<bool> is_over = false;
    std::atomic<size_t> n_refused = 0;
    std::thread granting([&] {
      while (!is_over) {
        std::string error;
        const auto grant = pair.consumer.transfers->grant(std::nullopt, pair.consumer.rows("stored", 4),
                                                          Deadline::after(kLong), &error);
        if (!grant) ++n_refused;
        if (grant) grant->revoke(RowStatus::kCanceled);
      }
    });
    moments.await();
    pair.consumer.transfers->remove_memory(pair.consumer.memory);
    pair.consumer.fill(0xca9a47, 0, 4);
    while (n_refused == 0) std::this_thread::yield();
    is_over = true;
    granting.join();
    for (size_t row = 0; row < 4; ++row) CHECK(pair.consumer.holds(0xca9a47, row));
  }
}
