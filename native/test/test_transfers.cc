// Offers and pulls: two nodes' transfers in one process, over tcp, and what withdrawals, revocations and ends
// do to pulls that are under way.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
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
using p2pkv::RowStatus;
using p2pkv::RowStatuses;
using p2pkv::Transfers;
using p2pkv::test::all_are;
using p2pkv::test::kRowBytes;
using p2pkv::test::Over;
using p2pkv::test::Pair;
using p2pkv::test::Party;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kIsSanitized = true;
#else
constexpr bool kIsSanitized = false;
#endif

struct Hunted {
  size_t n_right = 0;
  size_t n_wrong = 0;
  size_t n_rejected = 0;
};

// Puts offers into grants, withdraws each at a random moment, and writes over the memory at once.
Hunted hunt_withdrawals(Over over, size_t n_offers, bool is_validating) {
  constexpr size_t kRows = 12;
  Transfers::Options options;
  options.is_validating = is_validating;
  Pair pair(kRows, options, over);
  p2pkv::test::Moments moments(p2pkv::test::seed("withdrawals"));
  Hunted hunted;
  for (size_t i = 0; i < n_offers; ++i) {
    const std::string request = "hunt " + std::to_string(i);
    // TSan would report what is the point here: that the bytes of a withdrawn offer are written to.
    const uint64_t value = kIsSanitized ? 7 : 1000 + i;
    if (!kIsSanitized || i == 0) pair.producer.fill(value, kRows);
    const auto grant = pair.grant(request, kRows);
    const auto offer = pair.put(request, kRows);
    moments.await();
    offer->withdraw(RowStatus::kRejected);
    if (!kIsSanitized) pair.producer.fill(~value, kRows);
    grant->wait(Deadline::after(30.0));
    const RowStatuses statuses = grant->statuses();
    if (all_are(statuses, RowStatus::kOk)) moments.came_too_late();
    if (all_are(statuses, RowStatus::kRejected)) moments.came_too_early();
    for (size_t row = 0; row < kRows; ++row) {
      if (statuses[row] != RowStatus::kOk) {
        CHECK(statuses[row] == RowStatus::kRejected);
        ++hunted.n_rejected;
      } else if (pair.consumer.holds(value, row)) {
        ++hunted.n_right;
      } else {
        ++hunted.n_wrong;
      }
    }
    if (is_validating && offer->statuses()[0] == RowStatus::kRejected)
      CHECK(!all_are(statuses, RowStatus::kOk));
  }
  return hunted;
}

}  // namespace

// P2PKV_HUNT sets how many offers each hunt makes.
TEST(transfers_offers_withdrawn_while_they_are_pulled_are_never_wrong) {
  const char* given = std::getenv("P2PKV_HUNT");
  const size_t n_offers = given != nullptr ? std::strtoull(given, nullptr, 10) : kIsSanitized ? 200 : 1500;
  for (const Over over : {Over::kTcp, Over::kShm}) {
    const Hunted hunted = hunt_withdrawals(over, n_offers, true);
    std::cout << "        " << n_offers << " offers: " << hunted.n_right << " rows right, "
              << hunted.n_rejected << " rejected, " << hunted.n_wrong << " wrong" << std::endl;
    CHECK_EQ(hunted.n_wrong, size_t{0});
    CHECK(hunted.n_right > 0);
    CHECK(hunted.n_rejected > 0);
  }
}

TEST(transfers_without_the_proof_wrong_bytes_are_found) {
  if (kIsSanitized) return;  // the bytes are not written over there
  for (const Over over : {Over::kTcp, Over::kShm}) {
    size_t n_wrong = 0;
    for (int attempt = 0; attempt < 10 && n_wrong == 0; ++attempt)
      n_wrong += hunt_withdrawals(over, 500, false).n_wrong;
    CHECK(n_wrong > 0);
  }
}

// Each is copied and written over while it is pulled from where it lay.
TEST(transfers_stowed_while_they_are_pulled_are_never_wrong) {
  constexpr size_t kRows = 12;
  Transfers::Options options;
  options.buddy_pool_nbytes = 2 * kRows * kRowBytes;
  Pair pair(kRows, options);
  p2pkv::test::Moments moments(p2pkv::test::seed("stowing"));
  std::string error;
  for (size_t i = 0; i < (kIsSanitized ? 100 : 500); ++i) {
    const std::string request = "stowed " + std::to_string(i);
    const uint64_t value = kIsSanitized ? 7 : 1000 + i;
    if (!kIsSanitized || i == 0) pair.producer.fill(value, kRows);
    const auto ask = [&] {
      return pair.consumer.transfers->grant(pair.producer.key, pair.consumer.rows(request, kRows),
                                            Deadline::after(30.0), &error);
    };
    const auto offer = pair.producer.transfers->offer(std::nullopt, pair.producer.rows(request, kRows),
                                                      Deadline::after(30.0), &error);
    auto grant = ask();
    moments.await();
    const auto stowed = offer->stow();
    CHECK(stowed || offer->done());
    if (!kIsSanitized) pair.producer.fill(~value, kRows);
    grant->wait(Deadline::after(30.0));
    if (all_are(grant->statuses(), RowStatus::kOk)) {
      moments.came_too_late();
    } else {
      CHECK(all_are(grant->statuses(), RowStatus::kRejected));
      moments.came_too_early();
      grant = ask();
      grant->wait(Deadline::after(30.0));
      CHECK(all_are(grant->statuses(), RowStatus::kOk));
    }
    for (size_t row = 0; row < kRows; ++row) CHECK(pair.consumer.holds(value, row));
    offer->wait(Deadline::after(30.0));
  }
  CHECK_EQ(pair.producer.reading("p2pkv_buddy_pool_used_bytes"), uint64_t{0});
}

TEST(transfers_nothing_is_written_after_a_revocation) {
  constexpr size_t kRows = 16;
  Pair pair(kRows);
  pair.producer.fill(7, kRows);
  p2pkv::test::Moments moments(p2pkv::test::seed("revocations"));
  size_t n_canceled = 0;
  for (size_t i = 0; i < (kIsSanitized ? 100 : 400); ++i) {
    const std::string request = "revoked " + std::to_string(i);
    const auto grant = pair.grant(request, kRows);
    const auto offer = pair.put(request, kRows);
    moments.await();
    grant->revoke(RowStatus::kCanceled);
    const RowStatuses statuses = grant->statuses();
    pair.consumer.fill(0xca9a47, kRows);
    const bool was_too_late = all_are(statuses, RowStatus::kOk);
    n_canceled += was_too_late ? 0 : 1;
    was_too_late ? moments.came_too_late() : moments.came_too_early();
    moments.await();
    offer->withdraw(RowStatus::kRejected);
    for (size_t row = 0; row < kRows; ++row) CHECK(pair.consumer.holds(0xca9a47, row));
  }
  CHECK(n_canceled > 0);
  // The peer goes on: only the connections of those pulls were broken off.
  const auto grant = pair.grant("afterwards", kRows);
  const auto offer = pair.put("afterwards", kRows);
  grant->wait(Deadline::after(30.0));
  CHECK(all_are(grant->statuses(), RowStatus::kOk));
}

TEST(transfers_gets_revoked_while_their_offers_wait_leave_them_with_the_producer) {
  constexpr uint32_t kRows = 16;
  Pair pair(kRows);
  pair.producer.fill(7, kRows);
  p2pkv::test::Moments moments(p2pkv::test::seed("gets"));
  for (size_t i = 0; i < (kIsSanitized ? 60 : 200); ++i) {
    const std::string request = "got " + std::to_string(i);
    std::vector<std::shared_ptr<Offer>> offers;
    for (uint32_t row = 0; row < kRows; ++row) {
      offers.push_back(pair.producer.transfers->offer(std::nullopt, pair.producer.rows(request, 1, row),
                                                      Deadline::after(30.0), &pair.producer.error));
    }
    const auto get = [&pair, &request] {
      return pair.consumer.transfers->grant(1, pair.consumer.rows(request, kRows), Deadline::after(30.0),
                                            &pair.consumer.error);
    };
    const auto first = get();
    moments.await();
    first->revoke(RowStatus::kCanceled);
    const RowStatuses had = first->statuses();
    if (all_are(had, RowStatus::kOk)) moments.came_too_late();
    if (std::count(had.begin(), had.end(), RowStatus::kOk) == 0) moments.came_too_early();
    const auto second = get();
    // What the first one had not taken, and the producer thinks so too, is there for the second.
    for (uint32_t row = 0; row < kRows; ++row) {
      if (had[row] == RowStatus::kOk) continue;
      offers[row]->wait(Deadline::after(30.0));
      CHECK(offers[row]->statuses()[0] == RowStatus::kOk);
    }
    second->revoke(RowStatus::kCanceled);
  }
}

TEST(transfers_gets_and_puts_of_many_threads_arrive) {
  constexpr size_t kThreads = 4;
  Transfers::Options options;
  options.buffer_nbytes = 1 << 20;
  Pair pair(kThreads * 4, options);
  for (size_t row = 0; row < kThreads * 4; ++row)
    std::memset(pair.producer.bytes.data() + row * kRowBytes, static_cast<int>(row + 1), kRowBytes);
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&pair, t] {
      for (int turn = 0; turn < 40; ++turn) {
        const std::string request = std::to_string(t) + "/" + std::to_string(turn);
        const bool is_put = turn % 2 == 0;
        std::string error;
        std::optional<uint64_t> to = is_put ? std::optional<uint64_t>(2) : std::nullopt;
        std::optional<uint64_t> from = is_put ? std::nullopt : std::optional<uint64_t>(1);
        const auto rows = pair.producer.rows(request, 4, t * 4);
        const auto offer = pair.producer.transfers->offer(to, rows, Deadline::after(30.0), &error);
        const auto grant = pair.consumer.transfers->grant(from, pair.consumer.rows(request, 4, t * 4),
                                                          Deadline::after(30.0), &error);
        grant->wait(Deadline::after(30.0));
        CHECK(all_are(grant->statuses(), RowStatus::kOk));
        offer->wait(Deadline::after(30.0));
        CHECK(all_are(offer->statuses(), RowStatus::kOk));
        for (size_t row = t * 4; row < t * 4 + 4; ++row)
          CHECK(pair.consumer.holds(0x0101010101010101u * (row + 1), row));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(pair.producer.reading("p2pkv_open_offers"), uint64_t{0});
  CHECK_EQ(pair.consumer.reading("p2pkv_open_grants"), uint64_t{0});
  CHECK_EQ(pair.consumer.reading("p2pkv_receive_buffer_used_bytes"), uint64_t{0});
}

TEST(transfers_end_while_pulls_are_under_way) {
  constexpr size_t kRows = 16;
  for (int turn = 0; turn < 20; ++turn) {
    Pair pair(kRows);
    std::vector<std::shared_ptr<Offer>> offers;
    std::vector<std::shared_ptr<Grant>> grants;
    for (uint32_t i = 0; i < 4; ++i) {
      grants.push_back(pair.grant(std::to_string(i), kRows));
      offers.push_back(pair.put(std::to_string(i), kRows));
    }
    p2pkv::test::spin(std::chrono::microseconds(turn * 100));
    Party& first = turn % 2 == 0 ? pair.producer : pair.consumer;
    first.transfers->close();
    for (const auto& offer : offers) {
      offer->wait(Deadline::after(10.0));
      CHECK(offer->done());
    }
    pair.consumer.transfers->close();
    for (const auto& grant : grants) {
      CHECK(grant->done());
    }
  }
}

TEST(transfers_frames_that_no_node_sends_cost_their_link_only) {
  Pair pair(4);
  // A closed source, a request nobody offers, and rows of memory that is gone settle.
  pair.producer.transfers->remove_memory(pair.producer.memory);
  const auto got = pair.consumer.transfers->grant(1, pair.consumer.rows("nothing", 4), Deadline::after(0.1),
                                                  &pair.consumer.error);
  got->wait(Deadline::after(10.0));
  CHECK(all_are(got->statuses(), RowStatus::kTimedOut));
  CHECK_EQ(pair.producer.transfers->find_unregistered(pair.producer.rows("x", 4).spans, true), int64_t{0});
}
