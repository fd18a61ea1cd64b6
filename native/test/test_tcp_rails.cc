// The tcp transport over two rails, of which a test cuts one: every page comes over the other, in time.
#include <algorithm>
#include <cstring>
#include <random>

#include "check.h"
#include "relay.h"
#include "seed.h"
#include "transports/tcp/rail_ends.h"
#include "transports/transports.h"

using namespace p2pkv;
using p2pkv::test::Relay;
using p2pkv::test::through;

namespace {

constexpr uint64_t kPage = 64 << 10;
constexpr uint64_t kPages = 256;
constexpr uint64_t kTable = 4096;
constexpr uint64_t kBytes = kTable + kPages * kPage;

double seconds_since(Deadline::Clock::time_point began) {
  return std::chrono::duration<double>(Deadline::Clock::now() - began).count();
}

// An owner that listens at two addresses, and a reader that reaches each through a relay.
struct TwoRails {
  TwoRails() : memory(kBytes), bytes(kBytes) {
    std::string error;
    TcpOptions options;
    options.streams = 1;
    options.addresses = {"127.0.0.1", "127.0.0.2"};
    owner = make_tcp_transport(options, &error);
    CHECK(owner);
    options.addresses = {};
    reader = make_tcp_transport(options, &error);
    auto* words = reinterpret_cast<uint64_t*>(memory.data());
    for (uint64_t i = 0; i < kBytes / 8; ++i) words[i] = i < kPages ? 2 : i * 0x9e3779b97f4a7c15;
    region = owner->register_memory(memory.data(), kBytes, -1, true, &error);
    local = reader->register_memory(bytes.data(), kBytes, -1, false, &error);
    tcp::EndpointBlob first;
    tcp::AddressBlob second;
    const std::string half = owner->accept(reader->open()->describe(), &error);
    std::memcpy(&first, half.data(), sizeof first);
    std::memcpy(&second, half.data() + half.size() - sizeof second, sizeof second);
    relays.push_back(std::make_unique<Relay>(1, first.port));
    relays.push_back(std::make_unique<Relay>(2, second.port));
    connect();
  }
  ~TwoRails() { endpoint->close(); }

  void connect() {
    std::string error;
    if (endpoint) endpoint->close();
    ++n_endpoints;
    endpoint = reader->open();
    const std::string half = owner->accept(endpoint->describe(), &error);
    CHECK(endpoint->bind(through(half, {relays[0]->port(), relays[1]->port()}), &error));
    remote = endpoint->attach(region->describe(), &error);
  }

  // Reads pages as a fetch does: over a new endpoint where the old one is worn, and once more where that was
  // lost. Looks at each byte; how long it took.
  double read(uint64_t n_pages) {
    const auto began = Deadline::Clock::now();
    if (endpoint->is_worn()) connect();
    Status worst = read_once(n_pages, 20);
    if (worst == Status::kPeerLost) {
      ++n_lost;
      connect();
      worst = read_once(n_pages, 20);
    }
    const double took = seconds_since(began);
    CHECK(worst == Status::kOk);
    CHECK(std::memcmp(bytes.data() + kTable, memory.data() + kTable, n_pages * kPage) == 0);
    const uint8_t* beyond = bytes.data() + kTable + n_pages * kPage;  // nobody's yet
    const size_t n_beyond = (kPages - n_pages) * kPage;
    CHECK(n_beyond == 0 || (*beyond == 0xee && std::memcmp(beyond, beyond + 1, n_beyond - 1) == 0));
    return took;
  }

  // The worst that became of a page.
  Status read_once(uint64_t n_pages, double timeout) {
    std::memset(bytes.data(), 0xee, bytes.size());
    std::vector<Span> spans;
    std::vector<Word> words;
    for (uint64_t page = 0; page < n_pages; ++page) {
      const auto at = static_cast<int64_t>(kTable + page * kPage);
      spans.push_back({at, at, static_cast<int64_t>(kPage)});
      words.push_back({page * 8, 2});
    }
    const auto transfer = endpoint->read(local, remote, spans, words);
    transfer->wait(timeout);
    return *std::max_element(transfer->statuses().begin(), transfer->statuses().end());
  }

  RailTotals total(size_t rail) const { return reader->rail_totals().at(rail); }

  std::vector<uint8_t> memory, bytes;
  std::shared_ptr<TcpTransportBase> owner, reader;
  std::shared_ptr<MemoryRegion> region, local;
  std::vector<std::unique_ptr<Relay>> relays;
  std::shared_ptr<Endpoint> endpoint;
  std::shared_ptr<RemoteRegion> remote;
  int n_endpoints = 0, n_lost = 0;
};

// Reads until neither rail owes anything.
void settle(TwoRails& pair) {
  for (int round = 0; round < 5; ++round) pair.read(kPages);
}

// Reads until a rail brings bytes, which it does once it has proved itself.
void wait_for(TwoRails& pair, size_t rail) {
  const uint64_t before = pair.total(rail).n_bytes;
  for (const auto began = Deadline::Clock::now(); seconds_since(began) < 60;) {
    pair.read(kPages);
    if (pair.total(rail).n_bytes > before) return;
  }
  CHECK(false);
}

}  // namespace

TEST(tcp_reads_over_two_rails) {
  TwoRails pair;
  const auto least = [&] { return std::min(pair.total(0).n_bytes, pair.total(1).n_bytes); };
  for (int round = 0; round < 20; ++round) pair.read(kPages);
  // The thread of a relay that waits for a core looks like a rail that is slow, and is asked for less.
  for (const auto began = Deadline::Clock::now(); least() < kPages * kPage && seconds_since(began) < 60;)
    pair.read(kPages);
  for (int round = 0; round < 20; ++round) pair.read(1);
  CHECK(least() >= kPages * kPage);
  CHECK_EQ(pair.n_lost, 0);
}

TEST(tcp_heals_a_rail_that_falls_silent) {
  std::vector<double> took;
  for (size_t round = 0; round < 8; ++round) {
    TwoRails pair;
    const size_t rail = round % 2;
    wait_for(pair, rail);
    pair.relays[rail]->cut_after(round * kPage);
    // A rail that was slow is asked for less than it may still carry: then a later read is the one that is
    // cut.
    for (const auto began = Deadline::Clock::now(); seconds_since(began) < 60;) {
      took.push_back(pair.read(kPages));
      if (pair.total(rail).n_silent > 0) break;
    }
    CHECK(pair.total(rail).n_silent > 0);
    CHECK(pair.total(rail).n_retried_bytes > 0);
    pair.relays[rail]->heal();
    wait_for(pair, rail);
  }
  std::sort(took.begin(), took.end());
  std::printf("  reads of a rail that was cut took %.0f ms, the longest %.0f\n", took[took.size() / 2] * 1e3,
              took.back() * 1e3);
  CHECK(took.back() < 10);
}

TEST(tcp_heals_a_rail_that_breaks) {
  for (size_t round = 0; round < 8; ++round) {
    TwoRails pair;
    const size_t rail = round % 2;
    wait_for(pair, rail);
    pair.relays[rail]->reset_after(round * kPage);
    const auto is_seen = [&] { return pair.total(rail).n_broken + pair.total(rail).n_silent > 0; };
    for (const auto began = Deadline::Clock::now(); !is_seen() && seconds_since(began) < 60;)
      pair.read(kPages);
    CHECK(is_seen());
  }
}

TEST(tcp_does_not_wait_for_a_rail_that_has_become_slow) {
  TwoRails pair;
  for (int round = 0; round < 10; ++round) pair.read(kPages);
  pair.relays[1]->slow(16 << 10);  // bytes a millisecond: half of a batch would take half a second
  for (int round = 0; round < 10; ++round) pair.read(kPages);
  const uint64_t before = pair.total(1).n_bytes;
  for (int round = 0; round < 4; ++round) pair.read(kPages);
  CHECK(pair.total(1).n_bytes - before < kPages * kPage);
}

TEST(tcp_waits_for_the_deadline_of_a_stopped_owner) {
  TwoRails pair;
  pair.read(kPages);
  pair.connect();
  const uint64_t before = pair.total(0).n_silent + pair.total(1).n_silent;
  for (const auto& relay : pair.relays) relay->cut();
  CHECK(pair.read_once(kPages, 0.1) == Status::kTimedOut);
  CHECK_EQ(pair.total(0).n_silent + pair.total(1).n_silent, before);
}

// One rail answers late, then the other: no connection is lost over it, and each is used again.
TEST(tcp_keeps_the_connections_of_an_owner_that_is_slow) {
  // A machine that stands still for longer looks like rails that owe too much to be kept, in a few rounds.
  int n_kept = 0, n_torn = 0;
  for (size_t round = 0; n_kept < 6 && n_torn < 6; ++round) {
    TwoRails pair;
    settle(pair);
    const int n_before = pair.n_endpoints;
    const size_t first = round % 2;
    pair.relays[first]->hold(std::chrono::milliseconds(60));
    const double took = pair.read(kPages);
    pair.relays[1 - first]->hold(std::chrono::milliseconds(60));
    for (const auto began = Deadline::Clock::now(); seconds_since(began) < 0.2;) pair.read(kPages);
    CHECK(pair.total(first).n_silent > 0 || took >= 0.05);
    settle(pair);
    for (const size_t rail : {0, 1}) wait_for(pair, rail);
    ++(pair.n_endpoints == n_before && pair.n_lost == 0 ? n_kept : n_torn);
  }
  CHECK_EQ(n_kept, 6);
}

TEST(tcp_loses_a_rail_that_died_while_nothing_went_over_it) {
  TwoRails pair;
  for (int round = 0; round < 5; ++round) pair.read(1);
  const uint64_t before = pair.total(1).n_silent;
  const int n_endpoints = pair.n_endpoints;
  pair.relays[1]->cut();
  const auto began = Deadline::Clock::now();
  while (pair.n_endpoints == n_endpoints && seconds_since(began) < 20) {
    // it is asked when the one that carries all is silent for a moment
    pair.relays[0]->hold(std::chrono::milliseconds(15));
    pair.read(1);
  }
  CHECK(pair.total(1).n_silent > before);
  CHECK(pair.n_endpoints > n_endpoints);
}

TEST(tcp_doubts_no_rail_because_a_wait_was_closed) {
  std::mt19937_64 random(test::seed("tcp_doubts_no_rail"));
  TwoRails pair;
  settle(pair);
  int n_closed = 0;
  for (int round = 0; round < 200; ++round) {
    std::thread closing([&, pause = std::chrono::microseconds(random() % 4000)] {
      std::this_thread::sleep_for(pause);
      pair.endpoint->close();
    });
    n_closed += pair.read_once(kPages, 20) == Status::kCanceled;
    closing.join();
    pair.connect();
  }
  CHECK(n_closed > 50);
  CHECK_EQ(pair.total(0).n_broken + pair.total(1).n_broken, uint64_t{0});
  for (const size_t rail : {0, 1}) wait_for(pair, rail);
}

TEST(tcp_begins_anew_when_its_last_rail_falls_silent) {
  TwoRails pair;
  wait_for(pair, 0);
  pair.relays[0]->cut();
  pair.read(kPages);
  pair.relays[0]->heal();
  pair.relays[1]->cut();
  pair.read(kPages);
}

// Rails are cut, broken, slowed, held up and healed at random while pages are read, of which one at a time
// lives. Every page comes, and what came late for a read writes into nobody's memory.
TEST(tcp_rails_hunt) {
  std::mt19937_64 random(test::seed("tcp_rails_hunt"));
  const auto draw = [&](uint64_t n) { return random() % n; };
  double longest = 0;
  for (int life = 0; life < 2; ++life) {
    TwoRails pair;
    size_t hurt = 0;
    for (int step = 0; step < 25; ++step) {
      if (draw(3) == 0) {
        pair.relays[hurt]->heal();
        if (draw(2) == 0) hurt = draw(2);
        Relay& relay = *pair.relays[hurt];
        switch (draw(6)) {
          case 0:
            relay.cut();
            break;
          case 4:
            relay.hold(std::chrono::milliseconds(draw(100)));
            break;
          case 1:
            relay.cut_after(draw(kPages * kPage));
            break;
          case 2:
            relay.reset_after(draw(kPages * kPage));
            break;
          case 3:
            relay.slow(8 << 10);
            break;
          default:
            break;
        }
      }
      longest = std::max(longest, pair.read(draw(2) == 0 ? 1 + draw(8) : 1 + draw(kPages)));
      std::memset(pair.bytes.data(), 0x11, kBytes);  // the caller's again
      if (draw(4) == 0) {
        pair.relays[hurt]->heal();  // what was on its way comes late
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      CHECK(std::all_of(pair.bytes.begin(), pair.bytes.end(), [](uint8_t byte) { return byte == 0x11; }));
      if (draw(2) == 0)
        pair.read(1);  // takes from sockets what came late, and looks at the rest of the memory
    }
  }
  std::printf("  longest read %.0f ms\n", longest * 1e3);
  CHECK(longest < 10);
}

TEST(tcp_pairs_addresses_of_one_subnet) {
  const auto address = [](uint8_t a, uint8_t b) {
    Address made;
    const uint8_t bytes[4] = {10, a, 0, b};
    std::memcpy(made.bytes, bytes, 4);
    return made;
  };
  const std::vector<LocalAddress> locals = {{address(1, 1), "10.1.0.1", "", 16},
                                            {address(2, 1), "10.2.0.1", "", 16}};
  const auto numbers = [&](const std::vector<Address>& remotes) {
    std::vector<std::pair<int, int>> found;
    for (const auto& ends : tcp::pair_ends(locals, remotes)) {
      found.emplace_back(ends.local == nullptr ? 0 : ends.local->address.bytes[1], ends.remote.bytes[1]);
    }
    return found;
  };
  using Numbers = std::vector<std::pair<int, int>>;
  CHECK(numbers({address(2, 9), address(1, 9)}) == (Numbers{{2, 2}, {1, 1}}));
  CHECK(numbers({address(1, 9)}) == (Numbers{{1, 1}}));
  CHECK(numbers({address(7, 9)}) == (Numbers{{1, 7}, {2, 7}}));  // by a router
  CHECK(numbers({address(7, 9), address(8, 9)}) == (Numbers{{1, 7}, {2, 8}}));
  CHECK(numbers({address(1, 9), address(8, 9)}) == (Numbers{{1, 1}, {0, 8}}));  // the kernel's choice
  CHECK(tcp::pair_ends({}, {address(1, 9), address(2, 9)}).size() == 2);
  CHECK(tcp::pair_ends({}, std::vector<Address>(12, address(1, 1))).size() == kMostRails);
}
