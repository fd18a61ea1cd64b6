// What one engine may take of its host's node: its share of the pool, and requests under way.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "hosts_node.h"

TEST(attach_an_engine_has_no_more_of_the_pool_than_its_share) {
  constexpr uint64_t kShare = 16;  // pages
  HostsNode node(64 * 2, {kShare * kPage, 8});
  const auto quiet = node.attach();
  Bytes memory(4 * kPage);
  EnginePages pages(memory.data(), 4);
  for (const PoolStatus status : quiet->publish(pages.get(), Deadline::after(30)).statuses)
    CHECK(status == PoolStatus::kStored);
  uint64_t round = 0;
  for (int life = 0; life < 6; ++life) {
    const auto greedy = node.attach();
    for (const uint64_t end = round + 40; round < end; ++round) {
      for (size_t i = 0; i < 4; ++i) pages.keys[i] = key_of(1000 + round * 4 + i);
      for (const PoolStatus status : greedy->publish(pages.get(), Deadline::after(30)).statuses)
        CHECK(status == PoolStatus::kStored);
      CHECK(node.pool->stats().pages <= 4 + kShare);
    }
    greedy->close();
    for (const auto end = Deadline::after(30); node.host->stats().engines > 1 && !end.passed();)
      std::this_thread::yield();
  }
  for (uint64_t i = 0; i < 4; ++i) CHECK(holds_byte(*node.pool, i, static_cast<uint8_t>(i + 1)));
  CHECK_EQ(node.host->stats().largest_charge, kShare * kPage);
  CHECK_EQ(node.host->stats().n_taken_out, 6U * 160U - kShare);
}

TEST(attach_a_batch_beyond_the_share_is_answered_to_its_end) {
  HostsNode node(64, {2 * kPage, 8});
  const auto engine = node.attach(), other = node.attach();
  Bytes memory(4 * kPage);
  const EnginePages pages(memory.data(), 4);
  const PageBatch last{1, 1, &pages.keys[3], &pages.pieces[3]};
  CHECK(other->publish(last, Deadline::after(30)).statuses[0] == PoolStatus::kStored);
  const auto answer = engine->publish(pages.get(), Deadline::after(30));
  CHECK(answer.statuses[0] == PoolStatus::kStored && answer.statuses[1] == PoolStatus::kStored);
  CHECK(answer.statuses[2] == PoolStatus::kNoRoom && answer.is_found[2] == 0);
  CHECK(answer.statuses[3] == PoolStatus::kExists && answer.is_found[3] != 0);
  CHECK_EQ(word(*node.pool, answer.locations[3]), answer.locations[3].generation);
}

TEST(attach_an_engine_has_as_many_requests_under_way_as_its_node_serves) {
  HostsNode node(4096, {0, 2});
  const auto engine = node.attach();
  std::atomic<size_t> n_stored{0}, n_lost{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 12; ++t) {
    threads.emplace_back([&, t] {
      Bytes memory(4 * kPage);
      for (uint64_t round = 0; round < 20; ++round) {
        EnginePages pages(memory.data(), 4);
        for (size_t i = 0; i < 4; ++i) pages.keys[i] = key_of((t * 20 + round) * 4 + i);
        const auto answer = engine->publish(pages.get(), Deadline::after(60));
        for (const uint8_t found : answer.is_found) n_stored += found;
        n_lost += answer.is_lost ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(n_stored.load(), size_t{12 * 20 * 4});  // each has waited for its turn
  CHECK_EQ(n_lost.load(), 0U);
  CHECK_EQ(node.host->stats().lines, 2U);
  CHECK_EQ(node.host->stats().n_refused, 0U);
}

TEST(attach_who_gets_no_turn_misses_at_its_deadline) {
  HostsNode node(4096, {0, 1});
  const auto engine = node.attach();
  constexpr size_t kLarge = 1024 * kGranule, kTurns = 40;
  std::atomic<size_t> n_turns{0};
  std::thread busy([&] {
    Bytes large(kLarge);
    const Piece piece = piece_of(large);
    for (; n_turns < kTurns; ++n_turns) {
      const Key key = key_of(1'000'000 + n_turns);
      engine->publish({1, 1, &key, &piece}, Deadline::after(60));
    }
  });
  Bytes memory(4 * kPage);
  const EnginePages pages(memory.data(), 4);
  size_t n_late = 0;
  while (n_turns < kTurns) {
    const auto answer = engine->publish(pages.get(), Deadline::after(1e-6));
    CHECK(!answer.is_lost);  // its node is there, and does what it can
    n_late += answer.statuses[0] == PoolStatus::kTimedOut ? 1 : 0;
  }
  busy.join();
  CHECK(n_late > 0);
}
