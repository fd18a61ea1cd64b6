// Offers of device memory that are stowed, against the emulated driver: the copies are right whatever ends or
// fails meanwhile, and nothing is copied after whoever waited for it has gone on.
#include <functional>

#include "device_transfer_pair.h"

namespace {

constexpr uint32_t kRows = 8;  // told as two offers, of what one piece of staging holds
constexpr uint32_t kPart = 4;

Setting with_buddy_pool() {
  Setting setting;
  setting.buddy_pool_nbytes = 2 * kRows * kRowBytes;
  return setting;
}

uint64_t used(const Pair& pair) {
  return pair.producer.reading("p2pkv_buddy_pool_used_bytes");
}

// A call of stow() on a thread of its own, whose copies are held.
struct HeldStowing {
  HeldStowing(const FakeCuda& fake, const std::shared_ptr<Offer>& offer) {
    fake.hold(1, 0);
    thread = std::thread([this, offer] { stowed = offer->stow(); });
    while (fake.counts().queued == 0) std::this_thread::yield();
  }
  bool is_stowed() {
    thread.join();
    return stowed.has_value();
  }
  std::optional<p2pkv::Stowed> stowed;
  std::thread thread;
};

}  // namespace

TEST(device_transfers_stowed_are_had_though_their_memory_is_anothers) {
  for (const On to : {On::kHost, On::kDevice}) {
    Setting setting = with_buddy_pool();
    setting.to = to;
    Pair pair(kRows, setting);
    const auto offer = pair.leave("stowed", kRows);
    CHECK(offer->stow());
    pair.producer.fill(0xbad, 0, kRows);
    CHECK(all_are(wait(pair.get("stowed", kRows)), RowStatus::kOk));
    CHECK(pair.is_right(kRows));
    CHECK(all_are(wait(offer), RowStatus::kOk));
    CHECK_EQ(used(pair), uint64_t{0});
    CHECK_EQ(pair.producer.reading("p2pkv_staged_to_host_bytes_total"), uint64_t{0});
    CHECK(pair.has_all_staging());
  }
}

// They read from what is the caller's next, and write to a pool that may be gone next.
TEST(device_transfers_that_are_being_stowed_are_waited_for_by_what_ends_them) {
  const std::vector<std::function<void(Pair&, Offer&)>> ends = {
      [](Pair& pair, Offer&) { pair.producer.transfers->close(); },
      [](Pair&, Offer& offer) { offer.withdraw(RowStatus::kRejected); },
      [](Pair& pair, Offer&) { pair.producer.transfers->remove_memory(pair.producer.memory); },
  };
  for (const auto& end : ends) {
    Pair pair(kPart, with_buddy_pool());
    const FakeCuda& fake = pair.producer.fake;
    const auto offer = pair.leave("ended", kPart);
    HeldStowing stowing(fake, offer);
    int64_t n_queued = -1;
    std::atomic<bool> has_ended = false;
    std::thread ending([&] {
      end(pair, *offer);
      n_queued = fake.counts().queued;
      has_ended = true;
    });
    while (all_are(offer->statuses(), RowStatus::kPending)) std::this_thread::yield();
    // Whoever does not wait has ended by then; on a machine too slow for that it goes unnoticed.
    const auto until = Deadline::after(0.1);
    while (!has_ended && !until.passed()) std::this_thread::yield();
    fake.hold(0, 0);
    ending.join();
    CHECK_EQ(n_queued, 0);
    CHECK(!stowing.is_stowed());
    CHECK(offer->done());
    CHECK_EQ(used(pair), uint64_t{0});
  }
}

TEST(device_transfers_that_cannot_be_stowed_stay_where_they_are) {
  Pair pair(kRows, with_buddy_pool());
  const FakeCuda& fake = pair.producer.fake;
  const auto offer = pair.leave("failed", kRows);
  fake.fail("cuMemcpyDtoHAsync", 1, 2, 1);
  CHECK(!offer->stow());
  fake.fail("", 0, 0, 0);
  CHECK_EQ(pair.producer.reading("p2pkv_unstowed_offers_total"), uint64_t{1});
  CHECK_EQ(used(pair), uint64_t{0});
  CHECK(all_are(wait(pair.get("failed", kRows)), RowStatus::kOk));
  CHECK(pair.is_right(kRows));
  // Its engine never gets done with it: the lease bounds the call.
  const uint64_t stream = fake.stream(0);
  fake.hold(0, 1);
  fake.launch_fill(stream, pair.producer.address, 0x78, kRowBytes, 0);
  auto rows = pair.producer.rows("unwritten", kRows);
  rows.stream = stream;
  const auto unwritten = pair.producer.transfers->offer(std::nullopt, std::move(rows), Deadline::after(0.1),
                                                        &pair.producer.error);
  CHECK(!unwritten->stow());
  CHECK_EQ(used(pair), uint64_t{0});
  fake.hold(0, 0);
  while (fake.counts().queued > 0) std::this_thread::yield();
  fake.destroy_stream(stream);
}

TEST(device_transfers_stowing_takes_what_the_engine_had_queued) {
  Pair pair(kRows, with_buddy_pool());
  const FakeCuda& fake = pair.producer.fake;
  const uint64_t stream = fake.stream(0);
  auto rows = pair.producer.rows("kernel", kRows);
  rows.stream = stream;
  fake.launch_fill(stream, pair.producer.address, 0x77, kRows * kRowBytes, 20000);
  const auto offer = pair.producer.transfers->offer(std::nullopt, std::move(rows), Deadline::after(kLong),
                                                    &pair.producer.error);
  CHECK(offer->stow());
  pair.producer.fill(0xbad, 0, kRows);
  CHECK(all_are(wait(pair.get("kernel", kRows)), RowStatus::kOk));
  for (size_t row = 0; row < kRows; ++row) CHECK(pair.consumer.holds(0x7777777777777777u, row));
  fake.destroy_stream(stream);
}

// It may still write there.
TEST(device_transfers_room_that_a_lost_device_was_to_fill_is_never_anothers) {
  Pair pair(kPart, with_buddy_pool());
  const FakeCuda& fake = pair.producer.fake;
  const auto offer = pair.leave("lost", kPart);
  HeldStowing stowing(fake, offer);
  fake.lose(0);
  CHECK(!stowing.is_stowed());
  offer->withdraw(RowStatus::kRejected);
  CHECK_EQ(used(pair), uint64_t{kPart * kRowBytes});
  fake.hold(0, 0);
}

// Of what nobody has taken, that is: a receiver may die half-way.
TEST(device_transfers_of_which_some_rows_are_taken_have_the_others_stowed) {
  Pair pair(kRows, with_buddy_pool());
  const auto offer = pair.leave("half", kRows);
  CHECK(all_are(wait(pair.get("half", kPart)), RowStatus::kOk));
  while (offer->statuses()[0] == RowStatus::kPending) std::this_thread::yield();
  const auto stowed = offer->stow();
  CHECK(stowed && stowed->spans.size() == kRows);
  for (uint32_t row = 0; stowed && row < kRows; ++row)
    CHECK_EQ(stowed->spans[row].nbytes, row < kPart ? int64_t{0} : int64_t{kRowBytes});
  pair.producer.fill(0xbad, 0, kRows);
  CHECK(all_are(wait(pair.get("half", kPart, kPart)), RowStatus::kOk));
  CHECK(pair.is_right(kRows));
  CHECK(all_are(wait(offer), RowStatus::kOk));
  CHECK(!offer->stow());
}

// P2PKV_HUNT sets how many offers are stowed while they are staged and pulled, and then written over.
TEST(device_transfers_stowed_while_they_are_staged_and_pulled_are_never_wrong) {
  const char* given = std::getenv("P2PKV_HUNT");
  const size_t n_offers = given != nullptr ? std::strtoull(given, nullptr, 10) : kIsSanitized ? 40 : 200;
  Pair pair(kRows, with_buddy_pool());
  Moments moments(p2pkv::test::seed("stowing"));
  size_t n_cut_off = 0;
  for (size_t i = 0; i < n_offers; ++i) {
    const std::string request = "stowed " + std::to_string(i);
    const uint64_t value = 1000 + i;
    pair.producer.fill(value, 0, kRows);
    const auto offer = pair.leave(request, kRows);
    const auto grant = pair.get(request, kRows);
    moments.await();
    const auto stowed = offer->stow();
    CHECK(stowed || offer->done());
    pair.producer.fill(~value, 0, kRows);
    const RowStatuses had = wait(grant);
    const bool is_cut_off = !all_are(had, RowStatus::kOk);
    is_cut_off ? moments.came_too_early() : moments.came_too_late();
    n_cut_off += is_cut_off ? 1 : 0;
    const RowStatuses got = is_cut_off ? wait(pair.get(request, kRows)) : had;
    for (size_t row = 0; row < kRows; ++row) {
      CHECK(had[row] == RowStatus::kOk || (had[row] == RowStatus::kRejected && got[row] == RowStatus::kOk));
      CHECK(pair.consumer.holds(value, row));
    }
    CHECK(all_are(wait(offer), RowStatus::kOk));
  }
  std::cout << "        " << n_offers << " offers, of which " << n_cut_off << " were cut off" << std::endl;
  CHECK(pair.has_all_staging());
  CHECK_EQ(used(pair), uint64_t{0});
}
