// Connections to peers: lent to one batch at a time, dropped when they are done for, and who is tried next.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>
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

// Whether it answers probes is asked twice a second: that it was read is newer, and surer.
TEST(peers_that_are_suspected_are_read_from_if_they_were_a_moment_ago) {
  FakePeers peers(open_good, {.proven = 0.05});
  const auto doubt = [&](uint64_t key, bool is_healthy) {
    peers.connections->change({{FakePeers::peer(key), is_healthy, {0, 1}}}, {});
  };
  peers.connections->release(peers.borrow(1), Status::kOk, {1, 10, 0});
  doubt(1, false);
  CHECK(eventually([&] { return peers.borrow(1) == nullptr; }));
  doubt(1, true);
  CHECK(peers.borrow(1));
  peers.connections->release(peers.borrow(2), Status::kOk, {});  // nothing came
  doubt(2, false);
  CHECK(!peers.borrow(2));

  FakePeers others(open_good, {.proven = 3600});
  others.connections->release(others.borrow(1), Status::kOk, {1, 10, 0});
  others.connections->change({{FakePeers::peer(1), false, {0, 1}}}, {});
  // It is the one that has read: in place of another one is made between calls, which ends the avoiding.
  const auto known = others.borrow(1);
  CHECK(known && known->has_read);
  others.connections->release(known, Status::kTimedOut, {0, 0, kSlow});
  CHECK(!others.borrow(1));  // it is left alone
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

TEST(peers_are_connected_to_ahead_once_in_a_while) {
  std::atomic<bool> is_up{false};
  FakePeers peers(
      [&](PeerId, size_t way, const Deadline&) -> std::shared_ptr<FakeEndpoint> {
        return is_up && way == 1 ? std::make_shared<FakeEndpoint>(Status::kOk) : nullptr;
      },
      {.retry_first = 0.05});
  const auto standing = [&] { return peers.connections->standings({FakePeers::peer(1)}).front(); };
  CHECK(standing().is_reachable && !standing().is_connected);
  for (int call = 0; call < 20; ++call) peers.connections->connect_ahead(FakePeers::peer(1));
  CHECK(eventually([&] { return peers.n_opened == 1; }));
  is_up = true;
  // The first way is left, as it would be within a call.
  CHECK(eventually([&] {
    peers.connections->connect_ahead(FakePeers::peer(1));
    return standing().is_connected;
  }));
  CHECK(peers.n_fallbacks > 0);
  peers.connections->change({FakePeers::member(1, FakePeers::kBoot, false)}, {});
  CHECK(!standing().is_connected && !standing().is_reachable);  // a suspect
  CHECK(standing().pace != nullptr);
  CHECK(peers.connections->standings({FakePeers::peer(77)}).front().pace == nullptr);
}

TEST(peers_that_cannot_be_connected_to_ahead_are_read_over_what_is_connected) {
  std::atomic<bool> is_up{true};
  FakePeers peers(
      [&](PeerId, size_t, const Deadline&) -> std::shared_ptr<FakeEndpoint> {
        return is_up ? std::make_shared<FakeEndpoint>(Status::kOk) : nullptr;
      },
      {.retry_first = 0});
  peers.connections->change({{FakePeers::peer(1), true, {0}}}, {});
  const auto lent = peers.borrow(1);
  CHECK(lent != nullptr);
  is_up = false;
  CHECK(eventually([&] {
    peers.connections->connect_ahead(FakePeers::peer(1));
    return peers.n_opened > 2;  // the first try has failed by then
  }));
  peers.connections->give_back(lent);
  CHECK_EQ(peers.n_fallbacks.load(), 0);
  CHECK(peers.borrow(1) == lent);
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

// Of pulls over a link that leads to whomever it is asked for.
PeerConnections::Route route(uint64_t link, std::vector<size_t> ways = {0, 1}) {
  return {link, std::move(ways),
          [](size_t) { return p2pkv::Opened{std::make_shared<FakeEndpoint>(Status::kOk), nullptr}; }};
}

TEST(peers_lend_pulls_what_fetches_opened_and_fetches_nothing_that_a_link_opened) {
  FakePeers peers(open_good);
  auto& connections = *peers.connections;
  for (const uint64_t link : {7, 8}) connections.add_link(FakePeers::peer(1), link);
  const auto fetching = peers.borrow(1);
  connections.release(fetching, Status::kOk, {1, 10, 0});
  const auto pulling = connections.borrow_over(FakePeers::peer(1), route(7));
  CHECK(pulling == fetching);
  const auto opened = connections.borrow_over(FakePeers::peer(1), route(7));
  CHECK(opened && opened != fetching);
  CHECK_EQ(peers.n_opened.load(), 1);  // over the control plane
  connections.release(opened, Status::kOk, {0, 10, 0});
  CHECK(peers.borrow(1) != opened);
  CHECK(connections.borrow_over(FakePeers::peer(1), route(8)) != opened);
  CHECK(connections.borrow_over(FakePeers::peer(1), route(7)) == opened);
  connections.release(pulling, Status::kOk, {0, 10, 0});
  CHECK(peers.borrow(1) == fetching);
  CHECK_EQ(connections.traffic().at(0).amount.nbytes, 10u);  // of pages
}

TEST(peers_that_only_a_link_leads_to_are_pulled_from_until_it_is_dropped) {
  FakePeers peers(open_good);
  auto& connections = *peers.connections;
  const PeerId stranger{9, 1};
  CHECK(!connections.borrow_over(stranger, route(7)));
  connections.add_link(stranger, 7);
  const auto idle = connections.borrow_over(stranger, route(7));
  const auto lent = connections.borrow_over(stranger, route(7));
  connections.release(idle, Status::kOk, {0, 10, 0});
  CHECK(!connections.borrow(stranger, Deadline::after(1)));
  const auto is_closed = [](const auto& connection) {
    return static_cast<FakeEndpoint&>(*connection->endpoint).is_closed();
  };
  connections.drop_link(stranger, 7);
  CHECK(is_closed(idle));
  CHECK(!is_closed(lent));
  connections.release(lent, Status::kOk, {0, 10, 0});
  CHECK(is_closed(lent));
  CHECK(!connections.borrow_over(stranger, route(7)));
}

TEST(peers_that_leave_the_view_keep_the_connections_of_their_links_alone) {
  FakePeers peers(open_good);
  auto& connections = *peers.connections;
  connections.add_link(FakePeers::peer(1), 7);
  const auto opened = connections.borrow_over(FakePeers::peer(1), route(7));
  connections.give_back(peers.borrow(1));
  connections.release(opened, Status::kOk, {0, 10, 0});
  connections.change({}, {1});
  CHECK_EQ(peers.n_closed(), 1u);
  CHECK(!peers.borrow(1));
  CHECK(connections.borrow_over(FakePeers::peer(1), route(7)) == opened);
}

TEST(peers_that_fetches_leave_alone_are_pulled_from) {
  FakePeers peers(open_good, {.avoid = 100});
  auto& connections = *peers.connections;
  connections.add_link(FakePeers::peer(1), 7);
  const auto opened = connections.borrow_over(FakePeers::peer(1), route(7));
  connections.release(opened, Status::kTimedOut, {0, 0, kSlow});
  const auto fetching = peers.borrow(1);  // the link's other end only says that it is this peer
  connections.give_back(fetching);
  CHECK(connections.borrow_over(FakePeers::peer(1), route(7)) == fetching);
  connections.release(fetching, Status::kTimedOut, {0, 0, kSlow});
  CHECK(!peers.borrow(1));  // a pull that waited for the peer in vain has found out for fetches
  CHECK(connections.borrow_over(FakePeers::peer(1), route(7)));
  connections.change({FakePeers::member(1, FakePeers::kBoot, false)}, {});
  CHECK(connections.borrow_over(FakePeers::peer(1), route(7)));
}

TEST(peers_that_a_link_does_not_lead_to_are_pulled_from_over_the_next_way) {
  FakePeers peers(open_good, {.retry_first = 100, .retry_most = 100});
  auto& connections = *peers.connections;
  connections.add_link(FakePeers::peer(1), 7);
  auto second_only = route(7);
  second_only.open = [](size_t way) -> std::optional<p2pkv::Opened> {
    if (way == 0) return p2pkv::Opened{};
    return p2pkv::Opened{std::make_shared<FakeEndpoint>(Status::kOk), nullptr};
  };
  CHECK_EQ(connections.borrow_over(FakePeers::peer(1), second_only)->way, 1u);
  CHECK_EQ(connections.n_fallbacks_of_pulls(), 1u);
  CHECK(eventually([&] { return peers.n_first_fallbacks == 1; }));
  CHECK_EQ(connections.borrow_over(FakePeers::peer(1), route(7))->way, 1u);
  CHECK_EQ(peers.borrow(1)->way, 0u);  // it is not blamed on whom the link's other end says to be
  connections.add_link(FakePeers::peer(2), 8);
  auto given_up = route(8);
  given_up.open = [](size_t) { return std::nullopt; };
  CHECK(!connections.borrow_over(FakePeers::peer(2), given_up));
  CHECK_EQ(connections.n_fallbacks_of_pulls(), 1u);
  CHECK_EQ(connections.borrow_over(FakePeers::peer(2), route(8))->way, 0u);
}

TEST(peers_fellows_of_a_lost_connection_are_closed) {
  FakePeers peers(open_good);
  const auto lost = peers.borrow(1), fellow = peers.borrow(1);
  for (const auto& each : {lost, fellow}) peers.connections->release(each, Status::kOk, {1, 10, 0});
  CHECK(peers.borrow(1) == fellow);
  CHECK(peers.borrow(1) == lost);
  peers.connections->release(fellow, Status::kOk, {1, 10, 0});
  peers.connections->release(lost, Status::kPeerLost, {});
  CHECK_EQ(peers.n_closed(), 2u);
  CHECK_EQ(peers.borrow(1)->way, 0u);
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
      const uint64_t key = 1 + dice() % 4;
      const auto connection = dice() % 2 == 0
                                  ? peers.borrow(key)
                                  : peers.connections->borrow_over(FakePeers::peer(key), route(10 + key));
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
      if (dice() % 50 == 0) {
        peers.connections->drop_link(FakePeers::peer(key), 10 + key);
        peers.connections->add_link(FakePeers::peer(key), 10 + key);
      }
    }
  };
  for (uint64_t key = 1; key <= 4; ++key) peers.connections->add_link(FakePeers::peer(key), 10 + key);
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
