// The reads of a fetch: each owner's pages are its own, and a call ends by its deadline whatever one owner
// does.
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cache/flights.h"
#include "check.h"
#include "fake_peers.h"
#include "keys.h"

namespace {

using p2pkv::Deadline;
using p2pkv::FetchBatch;
using p2pkv::Flights;
using p2pkv::Key;
using p2pkv::LocalMemory;
using p2pkv::Location;
using p2pkv::LocationCache;
using p2pkv::PeerId;
using p2pkv::Piece;
using p2pkv::Shard;
using p2pkv::Status;
using p2pkv::test::FakeEndpoint;
using p2pkv::test::FakePeers;
using p2pkv::test::key_of;
using p2pkv::test::open_good;

constexpr uint64_t kOwn = 99;

// A batch of pages of two pieces, in two registered memories, each located at one of `n_owners`.
struct Located {
  Shard shard{1 << 12};
  LocationCache cache{1 << 12, 100.0};
  FetchBatch batch;
  std::vector<LocalMemory> memories{2, LocalMemory{0, {nullptr, nullptr}}};

  explicit Located(size_t n_pages, uint64_t n_owners = 4)
      : batch(keys(n_pages), pieces(n_pages), memory_of(n_pages), 2) {
    std::vector<uint64_t> owners, boots;
    for (uint64_t key = 1; key <= n_owners; ++key) {
      owners.push_back(key);
      boots.push_back(FakePeers::kBoot);
    }
    shard.set_view(owners.data(), boots.data(), owners.size());
    std::vector<Location> locations;
    std::vector<int64_t> pages;
    for (size_t page = 0; page < n_pages; ++page) {
      locations.push_back({1 + page % n_owners, FakePeers::kBoot, 0, 16, 64, 2, 0, 0, p2pkv::kResident});
      pages.push_back(static_cast<int64_t>(page));
    }
    const std::vector<uint8_t> found(n_pages, 1);
    batch.locate(pages.data(), found.data(), locations.data(), n_pages, &shard, &cache);
  }

  static std::vector<Key> keys(size_t n) {
    std::vector<Key> keys;
    for (uint64_t name = 0; name < n; ++name) keys.push_back(key_of(name));
    return keys;
  }
  static std::vector<Piece> pieces(size_t n) {
    std::vector<Piece> pieces;
    for (size_t i = 0; i < 2 * n; ++i) pieces.push_back({static_cast<int64_t>(16 * i), 8});
    return pieces;
  }
  static std::vector<int32_t> memory_of(size_t n) {
    std::vector<int32_t> memory_of;
    for (size_t i = 0; i < n; ++i) memory_of.insert(memory_of.end(), {0, 1});
    return memory_of;
  }

  size_t n_hits() const {
    size_t n = 0;
    for (const uint8_t hit : batch.outcomes()) n += hit;
    return n;
  }
  size_t read(FakePeers& peers, double seconds) {
    Flights flights(batch, *peers.connections, memories, Deadline::after(seconds), false);
    flights.read(batch.group_by_owner(kOwn));
    size_t n = 0;
    for (const auto& taken : flights.taken()) n += taken.n_pages;
    return n;
  }
};

TEST(flights_read_every_leg_of_every_owner) {
  for (const uint64_t n_owners : {1, 4}) {
    FakePeers peers(open_good);
    Located located(8, n_owners);
    CHECK_EQ(located.read(peers, 5), 8u);
    CHECK_EQ(located.n_hits(), 8u);
    CHECK_EQ(peers.n_opened.load(), static_cast<int>(n_owners));
    for (const auto& endpoint : peers.endpoints) CHECK_EQ(endpoint->n_reads.load(), 2);
    Located again(8, n_owners);
    again.read(peers, 5);
    CHECK_EQ(peers.n_opened.load(), static_cast<int>(n_owners));  // over the same connections
  }
}

TEST(flights_to_a_silent_owner_cost_its_pages_only) {
  FakePeers peers([](PeerId peer, size_t, const Deadline&) {
    return std::make_shared<FakeEndpoint>(peer.key == 2 ? Status::kPending : Status::kOk);
  });
  Located located(8);
  const auto began = Deadline::Clock::now();
  CHECK_EQ(located.read(peers, 3), 6u);
  CHECK(Deadline::Clock::now() - began < std::chrono::seconds(20));
  CHECK_EQ(located.batch.misses()[FetchBatch::kTimedOut], 2u);
  CHECK_EQ(peers.n_closed(), 1u);
}

TEST(flights_do_not_wait_for_an_owner_that_is_not_connected_by_the_deadline) {
  FakePeers peers(
      [](PeerId peer, size_t, const Deadline& deadline) -> std::shared_ptr<FakeEndpoint> {
        while (peer.key == 2 && !deadline.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return peer.key == 2 ? nullptr : std::make_shared<FakeEndpoint>(Status::kOk);
      },
      {.patient_connect = 0.01});
  Located located(8);
  CHECK_EQ(located.read(peers, 3), 6u);
  CHECK_EQ(located.batch.misses()[FetchBatch::kPeerLost], 2u);
}

TEST(flights_to_an_unknown_boot_miss) {
  FakePeers peers(open_good);
  peers.connections->change({FakePeers::member(1, FakePeers::kBoot + 1)}, {2});
  Located located(8);
  CHECK_EQ(located.read(peers, 5), 4u);
  CHECK_EQ(located.batch.misses()[FetchBatch::kPeerLost], 4u);
}

TEST(flights_that_are_left_by_an_exception_are_called_off) {
  for (const bool is_connecting : {true, false}) {
    FakePeers peers([&](PeerId peer, size_t, const Deadline&) {
      if (peer.key == 4 && is_connecting) throw std::runtime_error("thrown on purpose");
      return std::make_shared<FakeEndpoint>(Status::kPending, peer.key == 4);
    });
    for (uint64_t key = 1; key <= 3; ++key) peers.connections->give_back(peers.borrow(key));
    Located located(8);
    bool is_thrown = false;
    try {
      located.read(peers, 20);
    } catch (const std::runtime_error&) {
      is_thrown = true;
    }
    CHECK(is_thrown);
    CHECK_EQ(located.n_hits(), 0u);
    // Nothing writes into the caller's memory any more, though nobody has closed the connections.
    for (size_t i = 0; i < 3; ++i) {
      CHECK_EQ(peers.endpoints[i]->n_reads.load(), 1);
      CHECK(peers.endpoints[i]->is_closed());
    }
  }
}

TEST(flights_end_when_the_peers_are_interrupted) {
  FakePeers peers(
      [](PeerId, size_t, const Deadline&) { return std::make_shared<FakeEndpoint>(Status::kPending); });
  Located located(8);
  std::thread closer([&] {
    while (peers.n_opened < 4) std::this_thread::yield();
    peers.connections->interrupt();
  });
  const auto began = Deadline::Clock::now();
  CHECK_EQ(located.read(peers, 100), 0u);
  CHECK(Deadline::Clock::now() - began < std::chrono::seconds(50));
  closer.join();
}

}  // namespace
