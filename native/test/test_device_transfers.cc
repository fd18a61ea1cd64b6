// Offers and pulls of device memory, against the emulated driver: right whatever is withdrawn, revoked, full
// or broken meanwhile, and nothing is copied from or to a device after a call has returned.
#include "device_transfer_pair.h"

TEST(device_transfers_bytes_are_right_between_hosts_and_devices_though_the_staging_is_smaller) {
  constexpr size_t kRows = 64;
  for (const Over over : {Over::kTcp, Over::kShm}) {
    for (const On from : {On::kHost, On::kDevice}) {
      for (const On to : {On::kHost, On::kDevice}) {
        Pair pair(kRows, {over, from, to});
        const auto put_into = pair.grant("put", kRows);
        const auto put = pair.put("put", kRows);
        CHECK(all_are(wait(put_into), RowStatus::kOk));
        CHECK(all_are(wait(put), RowStatus::kOk));
        CHECK(pair.is_right(kRows));
        pair.consumer.fill(0, 0, kRows);
        const auto left = pair.leave("left", kRows);
        CHECK(all_are(wait(pair.get("left", kRows)), RowStatus::kOk));
        CHECK(all_are(wait(left), RowStatus::kOk));
        CHECK(pair.is_right(kRows));
        CHECK(pair.has_all_staging());
        const uint64_t nbytes = 2 * kRows * kRowBytes;
        CHECK_EQ(pair.producer.reading("p2pkv_staged_to_host_bytes_total"), from == On::kHost ? 0 : nbytes);
        CHECK_EQ(pair.consumer.reading("p2pkv_staged_to_device_bytes_total"), to == On::kHost ? 0 : nbytes);
      }
    }
  }
}

TEST(device_transfers_rows_that_come_before_their_grant_are_copied_to_it) {
  constexpr size_t kRows = 8;
  Setting setting;
  setting.buffer_nbytes = 2 * kRows * kRowBytes;
  Pair pair(kRows, setting);
  CHECK(all_are(wait(pair.put("early", kRows)), RowStatus::kOk));
  CHECK(all_are(wait(pair.grant("early", kRows)), RowStatus::kOk));
  CHECK(pair.is_right(kRows));
  CHECK_EQ(pair.consumer.reading("p2pkv_receive_buffer_used_bytes"), uint64_t{0});
  CHECK_EQ(pair.consumer.reading("p2pkv_claimed_rows_total"), uint64_t{kRows});
}

TEST(device_transfers_layers_are_offered_one_by_one) {
  constexpr uint32_t kRows = 32;
  Pair pair(kRows);
  const auto grant = pair.grant("layers", kRows);
  std::vector<std::shared_ptr<Offer>> offers;
  for (uint32_t row = 0; row < kRows; row += 4) offers.push_back(pair.put("layers", 4, row));
  CHECK(all_are(wait(grant), RowStatus::kOk));
  CHECK(pair.is_right(kRows));
  for (const auto& offer : offers) CHECK(all_are(wait(offer), RowStatus::kOk));
}

TEST(device_transfers_what_nobody_asks_for_takes_no_staging) {
  constexpr uint32_t kRows = 16;
  Pair pair(4 * kRows);
  std::vector<std::shared_ptr<Offer>> unasked;
  for (uint32_t i = 0; i < 3; ++i)
    unasked.push_back(pair.leave("unasked " + std::to_string(i), kRows, i * kRows));
  const auto asked = pair.leave("asked", kRows, 3 * kRows);
  CHECK(all_are(wait(pair.get("asked", kRows, 3 * kRows)), RowStatus::kOk));
  CHECK(pair.is_right(kRows, 3 * kRows));
  CHECK(pair.has_all_staging());
  // What was asked for in vain gives its place to others, and is there for the next who asks.
  pair.producer.fake.delay_copies(1000);
  for (uint32_t i = 0; i < 3; ++i) {
    const auto got = pair.get("unasked " + std::to_string(i), 2 * kRows, i * kRows, kLong);
    spin(std::chrono::microseconds(500 * i));
    got->revoke(RowStatus::kCanceled);
  }
  CHECK(pair.has_all_staging());
  for (uint32_t i = 0; i < 3; ++i) {
    if (unasked[i]->done()) continue;
    const auto had = unasked[i]->statuses();
    const auto got = wait(pair.get("unasked " + std::to_string(i), kRows, i * kRows, 10.0));
    for (size_t row = 0; row < kRows; ++row) CHECK(had[row] == RowStatus::kOk || got[row] == RowStatus::kOk);
  }
}

TEST(device_transfers_a_full_staging_holds_up_its_own_until_their_lease_ends) {
  constexpr uint32_t kRows = 16;  // all of the staging
  Pair pair(3 * kRows);
  const auto parked = pair.put("parked", kRows, 0, 0.3);  // nobody grants it
  const auto waiting = pair.put("waiting", kRows, kRows);
  const auto lapsing = pair.put("lapsing", kRows, 2 * kRows, 0.1);
  CHECK(all_are(wait(lapsing), RowStatus::kTimedOut));
  CHECK(all_are(wait(parked), RowStatus::kTimedOut));
  CHECK(all_are(wait(pair.grant("waiting", kRows, kRows)), RowStatus::kOk));
  CHECK(all_are(wait(waiting), RowStatus::kOk));
  CHECK(pair.has_all_staging());
}

// Withdraws offers at a random moment and puts others in their place at once. Returns the wrong rows.
size_t hunt_withdrawals(Over over, size_t n_offers, bool is_validating, size_t* n_right) {
  constexpr uint32_t kRows = 12;
  Setting setting;
  setting.over = over;
  setting.is_validating = is_validating;
  Pair pair(2 * kRows, setting);
  Moments moments(p2pkv::test::seed("withdrawals"));
  size_t n_wrong = 0;
  for (size_t i = 0; i < n_offers; ++i) {
    const std::string request = "hunt " + std::to_string(i);
    const uint64_t value = 1000 + 2 * i;
    pair.producer.fill(value, 0, kRows);
    pair.producer.fill(value + 1, kRows, kRows);
    const auto grant = pair.grant(request, kRows);
    const auto offer = pair.put(request, kRows);
    moments.await();
    offer->withdraw(RowStatus::kRejected);
    pair.producer.fill(~value, 0, kRows);
    const auto other = pair.put("other " + request, kRows, kRows);
    const RowStatuses statuses = wait(grant);
    other->withdraw(RowStatus::kRejected);
    if (all_are(statuses, RowStatus::kOk)) moments.came_too_late();
    if (std::count(statuses.begin(), statuses.end(), RowStatus::kOk) == 0) moments.came_too_early();
    for (size_t row = 0; row < kRows; ++row) {
      if (statuses[row] != RowStatus::kOk) continue;
      ++(pair.consumer.holds(value, row) ? *n_right : n_wrong);
    }
  }
  CHECK(pair.has_all_staging());
  return n_wrong;
}

// P2PKV_HUNT sets how many offers each hunt makes.
TEST(device_transfers_withdrawn_while_they_are_staged_and_pulled_are_never_wrong) {
  const char* given = std::getenv("P2PKV_HUNT");
  const size_t n_offers = given != nullptr ? std::strtoull(given, nullptr, 10) : kIsSanitized ? 60 : 400;
  for (const Over over : {Over::kTcp, Over::kShm}) {
    if (kIsSanitized && over == Over::kShm) continue;  // the staging is written over while it is read
    size_t n_right = 0;
    CHECK_EQ(hunt_withdrawals(over, n_offers, true, &n_right), size_t{0});
    std::cout << "        " << n_offers << " offers: " << n_right << " rows right, 0 wrong" << std::endl;
    CHECK(n_right > 0);
  }
}

TEST(device_transfers_without_the_proof_wrong_bytes_are_found) {
  if (kIsSanitized) return;
  for (const Over over : {Over::kTcp, Over::kShm}) {
    size_t n_wrong = 0, n_right = 0;
    for (int attempt = 0; attempt < 20 && n_wrong == 0; ++attempt)
      n_wrong += hunt_withdrawals(over, 200, false, &n_right);
    CHECK(n_wrong > 0);
  }
}

TEST(device_transfers_whose_copies_nobody_waits_for_are_seen_to_be_wrong) {
  constexpr uint32_t kRows = 8;
  for (const bool is_from_device : {true, false}) {
    Setting setting;
    setting.from = is_from_device ? On::kDevice : On::kHost;
    setting.to = is_from_device ? On::kHost : On::kDevice;
    Pair pair(kRows, setting);
    pair.consumer.fill(0, 0, kRows);
    pair.producer.fake.lie_about_events(1);  // breaks the wait
    pair.producer.fake.hold(1, 0);
    const auto grant = pair.grant("lie", kRows);
    const auto offer = pair.put("lie", kRows);
    CHECK(all_are(wait(grant), RowStatus::kOk));
    CHECK(!pair.is_right(kRows));
    pair.producer.fake.hold(0, 0);
    while (pair.producer.fake.counts().queued > 0) std::this_thread::yield();
  }
}

TEST(device_transfers_nothing_is_written_after_a_revocation) {
  constexpr uint32_t kRows = 16;
  for (const On from : {On::kHost, On::kDevice}) {
    Setting setting;
    setting.from = from;
    Pair pair(kRows, setting);
    pair.consumer.fake.delay_copies(200);
    Moments moments(p2pkv::test::seed("revocations"));
    size_t n_canceled = 0;
    for (size_t i = 0; i < (kIsSanitized ? 40 : 150); ++i) {
      const std::string request = "revoked " + std::to_string(i);
      const auto grant = pair.grant(request, kRows);
      const auto offer = pair.put(request, kRows);
      moments.await();
      grant->revoke(RowStatus::kCanceled);
      const bool was_too_late = all_are(grant->statuses(), RowStatus::kOk);
      pair.consumer.fill(0xca9a47, 0, kRows);
      n_canceled += was_too_late ? 0 : 1;
      was_too_late ? moments.came_too_late() : moments.came_too_early();
      moments.await();
      offer->withdraw(RowStatus::kRejected);
      for (size_t row = 0; row < kRows; ++row) CHECK(pair.consumer.holds(0xca9a47, row));
    }
    CHECK(n_canceled > 0);
    CHECK(pair.has_all_staging());
    const auto grant = pair.grant("afterwards", kRows);
    const auto offer = pair.put("afterwards", kRows);
    CHECK(all_are(wait(grant), RowStatus::kOk));
    CHECK(pair.is_right(kRows));
  }
}

TEST(device_transfers_nothing_is_read_after_a_withdrawal_or_the_memory_is_gone) {
  constexpr uint32_t kRows = 16;
  Pair pair(kRows);
  pair.producer.fake.delay_copies(3000);
  const auto offer = pair.put("withdrawn", kRows);
  while (pair.producer.fake.counts().queued == 0) std::this_thread::yield();
  offer->withdraw(RowStatus::kRejected);
  CHECK_EQ(pair.producer.fake.counts().queued, 0);
  CHECK(offer->done());
  const auto other = pair.put("other", kRows);
  while (pair.producer.fake.counts().queued == 0) std::this_thread::yield();
  pair.producer.transfers->remove_memory(pair.producer.memory);
  CHECK_EQ(pair.producer.fake.counts().queued, 0);
  CHECK(all_are(other->statuses(), RowStatus::kRejected));
  CHECK(pair.has_all_staging());
}

TEST(device_transfers_wait_for_the_streams_they_are_told_of) {
  constexpr uint32_t kRows = 4;
  Pair pair(kRows);
  const FakeCuda& fake = pair.producer.fake;
  const uint64_t stream = fake.stream(0);
  auto rows = pair.producer.rows("kernel", kRows);
  rows.stream = stream;
  fake.launch_fill(stream, pair.producer.address, 0x77, kRows * kRowBytes, 30000);
  const auto offer = pair.producer.transfers->offer(2, rows, Deadline::after(kLong), &pair.producer.error);
  // The consumer's memory is cleared by a kernel of its own first.
  const uint64_t clearing = fake.stream(0);
  auto into = pair.consumer.rows("kernel", kRows);
  into.stream = clearing;
  fake.launch_fill(clearing, pair.consumer.address, 0, kRows * kRowBytes, 90000);
  CHECK(all_are(wait(pair.granted(std::nullopt, into, kLong)), RowStatus::kOk));
  for (size_t row = 0; row < kRows; ++row) CHECK(pair.consumer.holds(0x7777777777777777u, row));
  // One that is never done costs its own offer and grant, by their deadlines.
  fake.launch_fill(stream, pair.producer.address, 0x78, kRows * kRowBytes, 600000);
  auto late = pair.producer.rows("late", kRows);
  late.stream = stream;
  const auto is_late = pair.producer.transfers->offer(2, late, Deadline::after(0.1), &pair.producer.error);
  CHECK(all_are(wait(is_late), RowStatus::kTimedOut));
  auto bad = pair.consumer.rows("bad", kRows);
  bad.stream = 0xdead;
  const auto into_bad = pair.granted(std::nullopt, bad, kLong);
  const auto to_bad = pair.put("bad", kRows);
  CHECK(all_are(wait(into_bad), RowStatus::kDeviceFailed));
  CHECK(all_are(wait(to_bad), RowStatus::kDeviceFailed));
  CHECK(pair.consumer.transfers->device_failure().find("cuStreamGetCtx") != std::string::npos);
  fake.destroy_stream(clearing);
  while (fake.counts().queued > 0) std::this_thread::yield();
  fake.destroy_stream(stream);
}

TEST(device_transfers_failed_copies_fail_their_rows_and_nothing_else) {
  constexpr uint32_t kRows = 8;
  Pair pair(2 * kRows);
  const FakeCuda& fake = pair.producer.fake;
  fake.fail("cuMemcpyDtoHAsync", 1, 2, 1);
  const auto into_nothing = pair.grant("from", kRows);
  const auto from = pair.put("from", kRows);
  CHECK(all_are(wait(from), RowStatus::kDeviceFailed));
  CHECK(all_are(wait(into_nothing), RowStatus::kRejected));
  fake.fail("", 0, 0, 0);
  CHECK(pair.producer.transfers->device_failure().find(
            "cuMemcpyDtoHAsync of 262144 bytes: CUDA_ERROR_OUT_OF_MEMORY") != std::string::npos);
  fake.fail("cuMemcpyHtoDAsync", 1, 2, 0);
  const auto into = pair.grant("to", kRows);
  const auto to = pair.put("to", kRows);
  const RowStatuses statuses = wait(into);
  CHECK(std::count(statuses.begin(), statuses.end(), RowStatus::kDeviceFailed) >= 1);
  CHECK(wait(to) == statuses);
  for (size_t row = 0; row < kRows; ++row)
    CHECK(statuses[row] != RowStatus::kOk || pair.consumer.holds(Pair::value_of(row), row));
  // A get that failed leaves the offer with the producer.
  const auto left = pair.leave("left", kRows);
  fake.fail("cuMemcpyHtoDAsync", 1, 2, 0);
  CHECK(!all_are(wait(pair.get("left", kRows)), RowStatus::kOk));
  const RowStatuses got = wait(pair.get("left", kRows, 0, 2.0));
  const RowStatuses taken = left->statuses();
  for (size_t row = 0; row < kRows; ++row)
    CHECK(taken[row] == RowStatus::kOk && (got[row] == RowStatus::kOk || got[row] == RowStatus::kGone));
  CHECK(pair.has_all_staging());
}

TEST(device_transfers_a_lost_device_fails_its_rows_and_leaves_the_rest_alone) {
  constexpr uint32_t kRows = 8;
  Setting setting;
  setting.to = On::kHost;
  Pair pair(kRows, setting);
  const FakeCuda& fake = pair.producer.fake;
  auto host = p2pkv::SharedRegion::create(kRows * kRowBytes, &pair.producer.error);
  auto region = pair.producer.transport->register_memory(host->base(), host->nbytes(), host->fd(), true,
                                                         &pair.producer.error);
  pair.producer.transfers->add_memory(reinterpret_cast<uint64_t>(host->base()), host->nbytes(), true,
                                      {region}, {region->describe()});
  fake.hold(1, 0);
  const auto offer = pair.put("lost", kRows);
  while (fake.counts().queued == 0) std::this_thread::yield();
  fake.lose(0);
  CHECK(all_are(wait(offer), RowStatus::kDeviceFailed));
  CHECK(pair.producer.transfers->device_failure().find("CUDA_ERROR_LAUNCH_FAILED") != std::string::npos);
  CHECK(all_are(wait(pair.put("lost as well", kRows)), RowStatus::kDeviceFailed));
  fake.hold(0, 0);
  p2pkv::Rows rows{"host", 0, {}};
  for (size_t i = 0; i < kRows; ++i)
    rows.spans.push_back({reinterpret_cast<int64_t>(host->base()) + static_cast<int64_t>(i * kRowBytes),
                          static_cast<int64_t>(kRowBytes)});
  const auto grant = pair.grant("host", kRows);
  const auto from_host =
      pair.producer.transfers->offer(2, rows, Deadline::after(kLong), &pair.producer.error);
  CHECK(all_are(wait(grant), RowStatus::kOk));
  region->close();
}

TEST(device_transfers_end_while_pulls_are_under_way) {
  constexpr uint32_t kRows = 32;
  for (int turn = 0; turn < (kIsSanitized ? 6 : 20); ++turn) {
    Pair pair(kRows);
    pair.producer.fake.delay_copies(100);
    std::vector<std::shared_ptr<Offer>> offers;
    std::vector<std::shared_ptr<Grant>> grants;
    for (uint32_t i = 0; i < 4; ++i) {
      grants.push_back(pair.grant(std::to_string(i), kRows));
      offers.push_back(pair.put(std::to_string(i), kRows));
    }
    spin(std::chrono::microseconds(turn * 300));
    Party& first = turn % 2 == 0 ? pair.producer : pair.consumer;
    first.transfers->close();
    for (const auto& offer : offers) {
      offer->wait(Deadline::after(10.0));
      CHECK(offer->done());
    }
    pair.consumer.transfers->close();
    for (const auto& grant : grants) CHECK(grant->done());
  }
}

TEST(device_transfers_leave_nothing_behind) {
  const FakeCuda& fake = FakeCuda::get();
  fake.reset();
  const FakeCudaCounts before = fake.counts();
  {
    constexpr uint32_t kRows = 4;
    Pair pair(kRows);
    for (int i = 0; i < 200; ++i) {
      const std::string request = std::to_string(i);
      const auto offer = pair.put(request, kRows);
      const auto grant = pair.grant(request, kRows);
      if (i % 3 == 0) offer->withdraw(RowStatus::kRejected);
      if (i % 3 == 1) grant->revoke(RowStatus::kCanceled);
      wait(grant);
      offer->withdraw(RowStatus::kRejected);
    }
    CHECK(pair.has_all_staging());
    CHECK_EQ(pair.producer.reading("p2pkv_open_offers"), uint64_t{0});
    CHECK_EQ(pair.consumer.reading("p2pkv_open_grants"), uint64_t{0});
  }
  const FakeCudaCounts after = fake.counts();
  CHECK_EQ(after.streams, before.streams);
  CHECK_EQ(after.events, before.events);
  CHECK_EQ(after.locked_bytes, before.locked_bytes);
  CHECK_EQ(after.contexts, before.contexts);
}
