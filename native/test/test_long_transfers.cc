// Offers, gets, puts and grants of more rows than one message has: they are told in parts, and are one thing
// to whoever made them.
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "moments.h"
#include "offers/transfers.h"
#include "seed.h"
#include "transfer_pair.h"

namespace {

using p2pkv::Deadline;
using p2pkv::Grant;
using p2pkv::Offer;
using p2pkv::Rows;
using p2pkv::RowStatus;
using p2pkv::RowStatuses;
using p2pkv::Transfers;
using p2pkv::test::all_are;
using p2pkv::test::Over;
using p2pkv::test::Pair;
using p2pkv::test::Party;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kTurns = 6;
#else
constexpr int kTurns = 12;
#endif

// Three messages' worth, in rows of 16 bytes.
constexpr uint32_t kRows = 2 * Transfers::kMaxRows + 1000;
constexpr uint64_t kBytes = 16;

struct LongPair : Pair {
  // `n_areas`: how often the rows fit each party's memory.
  explicit LongPair(uint64_t n_areas = 1)
      : Pair(n_areas * kRows * kBytes / p2pkv::test::kRowBytes + 1, {}, Over::kShm) {}

  static Rows rows_of(const Party& party, const std::string& request, uint32_t n = kRows, uint32_t first = 0,
                      uint64_t area = 0) {
    Rows rows{request, first, {}};
    for (uint64_t row = first; row < first + n; ++row)
      rows.spans.push_back({static_cast<int64_t>(party.address() + (area * kRows + row) * kBytes), kBytes});
    return rows;
  }
  static uint64_t word(uint64_t seed, uint64_t row) { return seed * 1000003 + row; }
  void write(uint64_t seed) {
    for (uint64_t row = 0; row < kRows; ++row) {
      const uint64_t words[2] = {word(seed, row), word(seed, row)};
      std::memcpy(producer.bytes.data() + row * kBytes, words, kBytes);
    }
  }
  bool has(uint64_t seed, uint64_t row) const {
    uint64_t words[2];
    std::memcpy(words, consumer.bytes.data() + row * kBytes, kBytes);
    return words[0] == word(seed, row) && words[1] == word(seed, row);
  }
  // Every row that is OK is right; returns how many are.
  uint32_t check(uint64_t seed, const RowStatuses& statuses, uint32_t first = 0) const {
    uint32_t n_right = 0;
    for (uint32_t i = 0; i < statuses.size(); ++i) {
      if (statuses[i] != RowStatus::kOk) continue;
      CHECK(has(seed, first + i));
      ++n_right;
    }
    return n_right;
  }
  std::shared_ptr<Offer> offer(const std::string& request, std::optional<uint64_t> to = std::nullopt) {
    auto offer =
        producer.transfers->offer(to, rows_of(producer, request), Deadline::after(60.0), &producer.error);
    CHECK(offer != nullptr);
    return offer;
  }
  std::shared_ptr<Grant> get(const std::string& request, uint32_t n = kRows, uint32_t first = 0) {
    return consumer.transfers->grant(1, rows_of(consumer, request, n, first), Deadline::after(60.0),
                                     &consumer.error);
  }
};

// Has a call run behind all other threads that are made while this lives: whoever waits for a lock gets it as
// soon as the call lets go of it, and does all that it has to do before the call goes on. For that they share
// one processor, where the kernel runs a thread of the idle class only while nobody else there is ready.
class Behind {
 public:
  Behind() {
    sched_getaffinity(0, sizeof before_, &before_);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    is_arranged_ = sched_setaffinity(0, sizeof one, &one) == 0;
  }
  ~Behind() { sched_setaffinity(0, sizeof before_, &before_); }
  Behind(const Behind&) = delete;
  Behind& operator=(const Behind&) = delete;

  template <typename Call>
  void run(const Call& call) {
    std::thread([&] {
      const sched_param none{};
      is_arranged_ = sched_setscheduler(0, SCHED_IDLE, &none) == 0 && is_arranged_;
      call();
    }).join();
  }
  // A system may refuse it; then the call races with the others.
  bool is_arranged() const { return is_arranged_; }

 private:
  cpu_set_t before_;
  bool is_arranged_ = false;
};

}  // namespace

TEST(long_transfers_are_asked_for_before_any_of_them_is_taken) {
  Behind behind;
  LongPair pair;
  pair.write(1);
  // Two parts, once: whoever runs behind is slow on a machine that others use as well.
  constexpr uint32_t kOfTwoParts = Transfers::kMaxRows + 1;
  const auto offer =
      pair.producer.transfers->offer(std::nullopt, LongPair::rows_of(pair.producer, "asked for", kOfTwoParts),
                                     Deadline::after(300.0), &pair.producer.error);
  const Rows rows = LongPair::rows_of(pair.consumer, "asked for", kOfTwoParts);
  std::shared_ptr<Grant> all;
  behind.run(
      [&] { all = pair.consumer.transfers->grant(1, rows, Deadline::after(300.0), &pair.consumer.error); });
  all->wait(Deadline::after(300.0));
  CHECK(all_are(all->statuses(), RowStatus::kOk));
  CHECK_EQ(pair.check(1, all->statuses()), kOfTwoParts);
  offer->wait(Deadline::after(300.0));
  CHECK(all_are(offer->statuses(), RowStatus::kOk));
  if (!behind.is_arranged()) std::cout << "the system lets nobody choose who runs first: it was a race\n";
}

TEST(long_transfers_are_whole_whichever_side_comes_first) {
  LongPair pair;
  for (uint64_t turn = 0; turn < kTurns; ++turn) {
    const std::string request = "whole " + std::to_string(turn);
    pair.write(turn);
    const bool is_put = turn % 2 == 0;
    const auto make_grant = [&] {
      return pair.consumer.transfers->grant(is_put ? std::nullopt : std::optional<uint64_t>(1),
                                            LongPair::rows_of(pair.consumer, request), Deadline::after(60.0),
                                            &pair.consumer.error);
    };
    std::shared_ptr<Grant> grant = turn % 4 < 2 ? make_grant() : nullptr;
    const auto offer = pair.offer(request, is_put ? std::optional<uint64_t>(2) : std::nullopt);
    if (!grant) grant = make_grant();
    grant->wait(Deadline::after(60.0));
    CHECK(grant->done());
    const RowStatuses got = grant->statuses();
    CHECK_EQ(got.size(), size_t{kRows});
    CHECK(all_are(got, RowStatus::kOk));
    CHECK_EQ(pair.check(turn, got), kRows);
    offer->wait(Deadline::after(60.0));
    CHECK(offer->done());
    CHECK_EQ(offer->statuses().size(), size_t{kRows});
    CHECK(all_are(offer->statuses(), RowStatus::kOk));
  }
  CHECK_EQ(pair.producer.reading("p2pkv_open_offers"), uint64_t{0});
  CHECK_EQ(pair.consumer.reading("p2pkv_open_grants"), uint64_t{0});
}

TEST(long_transfers_are_over_with_a_get_of_some_of_their_rows) {
  LongPair pair;
  pair.write(1);
  for (const uint32_t first : {0u, static_cast<uint32_t>(Transfers::kMaxRows) + 7, kRows - 1}) {
    const std::string request = "some " + std::to_string(first);
    const auto offer = pair.offer(request);
    const auto some = pair.get(request, 1, first);
    some->wait(Deadline::after(60.0));
    CHECK(all_are(some->statuses(), RowStatus::kOk));
    CHECK_EQ(pair.check(1, some->statuses(), first), 1u);
    offer->wait(Deadline::after(60.0));
    CHECK(offer->done());
    const RowStatuses told = offer->statuses();
    CHECK_EQ(std::count(told.begin(), told.end(), RowStatus::kOk), 1);
    CHECK_EQ(std::count(told.begin(), told.end(), RowStatus::kOutOfRange), kRows - 1);
    const auto late = pair.get(request);
    late->wait(Deadline::after(60.0));
    CHECK(all_are(late->statuses(), RowStatus::kGone));
  }
}

TEST(long_transfers_leave_what_another_still_asks_for) {
  LongPair pair;
  pair.write(2);
  // It asks for the last part alone, before there is any, and once more for what is offered then.
  const auto last = pair.get("shared", 1000, 2 * Transfers::kMaxRows);
  const auto offer = pair.offer("shared");
  const auto all = pair.get("shared");
  last->wait(Deadline::after(60.0));
  all->wait(Deadline::after(60.0));
  CHECK(all_are(last->statuses(), RowStatus::kOk));
  const RowStatuses got = all->statuses();
  // Whoever was quicker with the last part has it; the others nobody else asked for.
  CHECK(pair.check(2, got) == kRows || pair.check(2, got) == kRows - 1000 || pair.check(2, got) == 0);
  CHECK(all->done());
  offer->wait(Deadline::after(60.0));
  CHECK(offer->done());
}

TEST(long_transfers_withdrawn_while_they_are_pulled_are_never_wrong) {
  LongPair pair;
  p2pkv::test::Moments moments(p2pkv::test::seed("long withdrawals"), std::chrono::milliseconds(20));
  size_t n_in_the_middle = 0;
  for (uint64_t turn = 0; turn < 2 * kTurns; ++turn) {
    const std::string request = "withdrawn " + std::to_string(turn);
    pair.write(turn);
    const auto offer = pair.offer(request, 2);
    const auto grant = pair.consumer.transfers->grant(std::nullopt, LongPair::rows_of(pair.consumer, request),
                                                      Deadline::after(60.0), &pair.consumer.error);
    moments.await();
    offer->withdraw(RowStatus::kRejected);
    const RowStatuses told = offer->statuses();
    CHECK(std::none_of(told.begin(), told.end(), [](RowStatus s) { return s == RowStatus::kPending; }));
    const size_t n_told = std::count(told.begin(), told.end(), RowStatus::kOk);
    // A part that was never told of can't be waited for: the grant has it pending.
    grant->wait(Deadline::after(n_told == kRows ? 60.0 : 0.05));
    grant->revoke(RowStatus::kCanceled);
    const RowStatuses got = grant->statuses();
    for (uint32_t row = 0; row < kRows; ++row)
      CHECK(got[row] != RowStatus::kOk || told[row] == RowStatus::kOk);
    const uint32_t n_right = pair.check(turn, got);
    if (n_right == kRows) moments.came_too_late();
    if (n_right == 0) moments.came_too_early();
    n_in_the_middle += n_right > 0 && n_right < kRows;
  }
  std::cout << "withdrawn in the middle: " << n_in_the_middle << "\n";
}

TEST(long_transfers_revoked_while_they_are_pulled_end_at_once_and_leave_the_rest) {
  LongPair pair(2);
  p2pkv::test::Moments moments(p2pkv::test::seed("long revocations"), std::chrono::milliseconds(20));
  for (uint64_t turn = 0; turn < 2 * kTurns; ++turn) {
    const std::string request = "revoked " + std::to_string(turn);
    pair.write(turn);
    const auto offer = pair.offer(request);
    const auto first = pair.get(request);
    moments.await();
    first->revoke(RowStatus::kCanceled);
    CHECK(first->done());
    const RowStatuses had = first->statuses();
    CHECK(std::none_of(had.begin(), had.end(), [](RowStatus s) { return s == RowStatus::kPending; }));
    const uint32_t n_had = pair.check(turn, had);
    if (n_had == kRows) moments.came_too_late();
    if (n_had == 0) moments.came_too_early();
    // The second one's memory is its own: so whatever is written to the first one's from now on comes too
    // late.
    auto& bytes = pair.consumer.bytes;
    std::fill(bytes.begin(), bytes.end(), 0);
    const auto second =
        pair.consumer.transfers->grant(1, LongPair::rows_of(pair.consumer, request, kRows, 0, 1),
                                       Deadline::after(60.0), &pair.consumer.error);
    second->wait(Deadline::after(60.0));
    CHECK(second->done());
    const RowStatuses got = second->statuses();
    // What neither has was being proven when it was revoked.
    for (const RowStatus status : got) CHECK(status == RowStatus::kOk || status == RowStatus::kGone);
    CHECK(std::all_of(bytes.begin(), bytes.begin() + kRows * kBytes, [](auto byte) { return byte == 0; }));
    std::copy_n(bytes.begin() + kRows * kBytes, kRows * kBytes, bytes.begin());
    pair.check(turn, got);
    offer->wait(Deadline::after(60.0));
    CHECK(offer->done());
  }
}

TEST(long_transfers_end_with_either_node) {
  for (int turn = 0; turn < kTurns / 2; ++turn) {
    LongPair pair;
    pair.write(3);
    const auto offer = pair.offer("ended");
    const auto get = pair.get("ended");
    p2pkv::test::spin(std::chrono::microseconds(turn * 500));
    (turn % 2 == 0 ? pair.producer : pair.consumer).transfers->close();
    get->wait(Deadline::after(60.0));
    CHECK(get->done());
    pair.check(3, get->statuses());
    pair.producer.transfers->close();
    CHECK(offer->done());
  }
}
