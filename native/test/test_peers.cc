// Connections to peers: lent to one batch at a time, dropped when they are done for, and who is tried next.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_peers.h"
#include "seed.h"

namespace {

using p2pkv::Deadline;
using p2pkv::PeerConnections;
using p2pkv::PeerId;
using p2pkv::Status;
using p2pkv::test::FakeEndpoint;
using p2pkv::test::FakePeers;
using p2pkv::test::open_good;

constexpr double kSlow = 1.0;  // seconds that a batch has waited for a peer

template <typename Condition>
bool eventually(const Condition& is_so) {
  const Deadline deadline = Deadline::after(20);
  while (!is_so()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

TEST(peers_lend_a_connection_to_one_batch_at_a_time) {
  FakePeers peers(open_good);
  const auto first = peers.borrow(1);
  const auto second = peers.borrow(1);
  CHECK(first && second && first != second);
  peers.connections->release(first, Status::kRejected, {1, 10, 0});
  CHECK(peers.borrow(1) == first);
  CHECK(peers.borrow(2)->peer.key == 2);
  CHECK_EQ(peers.n_opened.load(), 3);
  CHECK_EQ(peers.n_closed(), 0u);
}

TEST(peers_close_a_connection_that_is_done_for) {
  for (const Status worst : {Status::kCanceled, Status::kPeerLost, Status::kTimedOut}) {
    FakePeers peers(open_good);
    const auto connection = peers.borrow(1);
    peers.connections->release(connection, Status::kOk, {1, 10, 0});
    CHECK(peers.borrow(1) == connection);
    peers.connections->release(connection, worst, {});
    CHECK_EQ(peers.n_closed(), 1u);
    CHECK(peers.borrow(1) != connection);
    CHECK_EQ(peers.n_fallbacks.load(), 0);  // it has read: the way does lead there
  }
}

TEST(peers_that_made_a_batch_time_out_are_left_alone_for_a_moment) {
  FakePeers peers(open_good, {.avoid = 0.05});
  const auto borrow_and_wait = [&](double seconds) {
    const auto connection = peers.borrow(1);
    peers.connections->give_back(connection);
    peers.connections->release(peers.borrow(1), Status::kTimedOut, {0, 0, seconds});
  };
  borrow_and_wait(0.01);  // less than a fair chance
  borrow_and_wait(kSlow);
  CHECK(!peers.borrow(1));
  bool is_worth_connecting = true;
  CHECK(!peers.connections->borrow_idle(FakePeers::peer(1), &is_worth_connecting));
  CHECK(!is_worth_connecting);
  CHECK(peers.borrow(2));
  CHECK(eventually([&] { return peers.borrow(1) != nullptr; }));
}

TEST(peers_are_reached_over_the_next_way_until_the_first_may_be_tried_again) {
  std::atomic<bool> is_first_up{false};
  FakePeers peers(
      [&](PeerId, size_t way, const Deadline&) {
        return way == 0 && !is_first_up ? nullptr : std::make_shared<FakeEndpoint>(Status::kOk);
      },
      {.retry_first = 0.05, .retry_most = 0.05});
  CHECK_EQ(peers.borrow(1)->way, 1u);
  CHECK_EQ(peers.n_fallbacks.load(), 1);
  CHECK_EQ(peers.borrow(1)->way, 1u);
  CHECK_EQ(peers.n_opened.load(), 3);  // the first way was not tried again so soon
  is_first_up = true;
  CHECK(eventually([&] { return peers.borrow(1)->way == 0; }));
}

TEST(peers_whose_connection_never_read_anything_are_reached_over_the_next_way) {
  FakePeers peers(open_good);
  for (int i = 0; i < 2; ++i) {
    const auto connection = peers.borrow(1);
    CHECK_EQ(connection->way, static_cast<size_t>(i));
    peers.connections->release(connection, Status::kPeerLost, {});
  }
  CHECK(!peers.borrow(1));
  CHECK_EQ(peers.n_first_fallbacks.load(), 2);
}

TEST(peers_connections_end_with_the_boot_they_were_made_to) {
  FakePeers peers(open_good);
  peers.connections->give_back(peers.borrow(1));
  const auto lent = peers.borrow(2);
  CHECK(!peers.connections->borrow({1, FakePeers::kBoot + 1}, Deadline::after(1)));
  peers.connections->change({FakePeers::member(1, FakePeers::kBoot + 1)}, {2});
  CHECK_EQ(peers.n_closed(), 1u);
  CHECK(!peers.borrow(1));
  CHECK(peers.connections->borrow({1, FakePeers::kBoot + 1}, Deadline::after(1)));
  peers.connections->give_back(lent);  // to a node that is gone meanwhile
  CHECK_EQ(peers.n_closed(), 2u);
  CHECK(!peers.borrow(2));
}

TEST(peers_that_are_suspected_are_not_read_from) {
  FakePeers peers(open_good);
  const auto connection = peers.borrow(1);
  peers.connections->give_back(connection);
  peers.connections->change({FakePeers::member(1, FakePeers::kBoot, false)}, {});
  CHECK(!peers.borrow(1));
  peers.connections->change({FakePeers::member(1)}, {});
  CHECK(peers.borrow(1) == connection);
}

TEST(peers_idle_connections_are_closed_after_a_while) {
  FakePeers peers(open_good, {.idle = 0.05});
  for (int burst = 0; burst < 2; ++burst) {
    std::vector<PeerConnections::ConnectionPtr> lent;
    for (int i = 0; i < 8; ++i) lent.push_back(peers.borrow(1 + static_cast<uint64_t>(i) % 4));
    for (const auto& connection : lent) peers.connections->give_back(connection);
    CHECK(eventually([&] { return peers.n_closed() == 8u * static_cast<size_t>(burst + 1); }));
  }
}

TEST(peers_too_slow_to_connect_to_within_a_call_are_connected_to_between_calls) {
  std::atomic<bool> is_up{false};
  FakePeers peers(
      [&](PeerId, size_t, const Deadline& deadline) -> std::shared_ptr<FakeEndpoint> {
        while (!is_up && !deadline.passed()) std::this_thread::yield();
        return is_up ? std::make_shared<FakeEndpoint>(Status::kOk) : nullptr;
      },
      {.avoid = 100, .fair_chance = 0.01});
  CHECK(!peers.borrow(1, 0.3));
  CHECK(!peers.borrow(1, 0.3));
  CHECK_EQ(peers.n_fallbacks.load(), 0);
  is_up = true;
  CHECK(eventually([&] { return peers.borrow(1, 0) != nullptr; }));
  CHECK_EQ(peers.n_opened.load(), 2);  // the second call began nothing anew
  const std::lock_guard lock(peers.mutex);
  CHECK_EQ(peers.endpoints[0]->n_reads.load(), 1);  // it was proven before it was lent
}

TEST(peers_exceptions_of_connecting_reach_who_waits_for_it) {
  FakePeers peers([](PeerId, size_t, const Deadline&) -> std::shared_ptr<FakeEndpoint> {
    throw std::runtime_error("thrown on purpose");
  });
  bool is_thrown = false;
  try {
    peers.borrow(1);
  } catch (const std::runtime_error&) {
    is_thrown = true;
  }
  CHECK(is_thrown);
  std::atomic<bool> is_told{false};
  peers.connections->borrow_later(FakePeers::peer(1), Deadline::after(5),
                                  [&](PeerConnections::Borrowed borrowed) { is_told = !!borrowed.error; });
  CHECK(eventually([&] { return is_told.load(); }));
}

TEST(peers_exceptions_that_no_call_waits_for_are_told) {
  std::atomic<bool> is_first{true};
  FakePeers peers(
      [&](PeerId, size_t, const Deadline& deadline) -> std::shared_ptr<FakeEndpoint> {
        if (!is_first.exchange(false)) throw std::runtime_error("thrown on purpose");
        std::this_thread::sleep_until(deadline.at());
        return nullptr;
      },
      {.fair_chance = 0.01});
  CHECK(!peers.borrow(1, 0.3));
  CHECK(eventually([&] { return peers.n_failed == 1; }));
}

TEST(peers_that_are_interrupted_close_what_is_lent_and_lend_nothing) {
  FakePeers peers(open_good);
  const auto lent = peers.borrow(1);
  peers.connections->give_back(peers.borrow(2));
  peers.connections->interrupt();
  CHECK_EQ(peers.n_closed(), 1u);
  CHECK(!peers.borrow(2));
  peers.connections->release(lent, Status::kCanceled, {});
  peers.connections->close();
  CHECK_EQ(peers.n_closed(), 2u);
}

TEST(peers_lend_no_connection_twice_whatever_happens_meanwhile) {
  std::mt19937_64 random(p2pkv::test::seed("peers_lend_no_connection_twice"));
  FakePeers peers(
      [&](PeerId peer, size_t way, const Deadline&) {
        return peer.key == 3 && way == 0 ? nullptr : std::make_shared<FakeEndpoint>(Status::kOk);
      },
      {.avoid = 0.001, .fair_chance = 0, .retry_first = 0.001, .retry_most = 0.001, .idle = 0.002});
  std::mutex mutex;
  std::set<PeerConnections::ConnectionPtr> lent;
  std::atomic<int> n_twice{0};
  const auto use = [&](uint64_t seed) {
    std::mt19937_64 dice(seed);
    for (int i = 0; i < 1000; ++i) {
      const auto connection = peers.borrow(1 + dice() % 4);
      if (!connection) continue;
      {
        const std::lock_guard lock(mutex);
        n_twice += lent.insert(connection).second ? 0 : 1;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(dice() % 100));
      const Status outcomes[] = {Status::kOk, Status::kOk, Status::kOk, Status::kTimedOut, Status::kPeerLost};
      const Status worst = outcomes[dice() % 5];
      {
        const std::lock_guard lock(mutex);
        lent.erase(connection);
      }
      peers.connections->release(connection, worst, {1, 1, kSlow});
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(use, random());
  for (uint64_t i = 0; i < 200; ++i) {
    peers.connections->change({FakePeers::member(1 + i % 4, FakePeers::kBoot, i % 3 != 0)},
                              {1 + (i + 1) % 4});
    std::this_thread::yield();
  }
  for (uint64_t key = 1; key <= 4; ++key) peers.connections->change({FakePeers::member(key)}, {});
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(n_twice.load(), 0);
  peers.connections->close();
  const std::lock_guard lock(peers.mutex);
  for (const auto& endpoint : peers.endpoints) CHECK(endpoint->is_closed());
}

}  // namespace
