// Reads that are late, or fail, and other holders of their pages: what is found, what is left, and that what
// was left writes nothing any more.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "cache/flights.h"
#include "check.h"
#include "fake_peers.h"
#include "keys.h"
#include "seed.h"

namespace {

using p2pkv::BoundEndpoint;
using p2pkv::Deadline;
using p2pkv::FetchBatch;
using p2pkv::Flights;
using p2pkv::Hedges;
using p2pkv::HolderChoice;
using p2pkv::Key;
using p2pkv::LocalMemory;
using p2pkv::Location;
using p2pkv::LocationCache;
using p2pkv::OtherHolders;
using p2pkv::PeerConnections;
using p2pkv::PeerId;
using p2pkv::Piece;
using p2pkv::Shard;
using p2pkv::Span;
using p2pkv::Status;
using p2pkv::Transfer;
using p2pkv::test::key_of;

constexpr uint64_t kBoot = 5, kOwn = 99;
constexpr int64_t kPage = 16;

// Which pages' memory is being written to, by reads that have not settled.
class Air {
 public:
  void begin(const std::vector<Span>& spans) {
    const std::lock_guard lock(mutex_);
    for (const Span& span : spans) {
      if (span.length != kPage) continue;  // a test of a connection
      if (!written_.insert(span.local).second) ++n_clashes_;
    }
  }
  void end(const std::vector<Span>& spans) {
    const std::lock_guard lock(mutex_);
    for (const Span& span : spans) {
      if (span.length == kPage) written_.erase(span.local);
    }
  }
  size_t n_written() {
    const std::lock_guard lock(mutex_);
    return written_.size();
  }
  int n_clashes() {
    const std::lock_guard lock(mutex_);
    return n_clashes_;
  }

 private:
  std::mutex mutex_;  // guards all below
  std::set<int64_t> written_;
  int n_clashes_ = 0;
};

// What becomes of the pages at one holder: each read has an outcome at a time after it began.
struct Behaviour {
  Status outcome = Status::kOk;
  std::chrono::microseconds after{0};
};

class Endpoint : public BoundEndpoint {
 public:
  Endpoint(Air& air, Behaviour behaviour) : air_(air), behaviour_(behaviour) {}
  std::shared_ptr<Transfer> read(std::shared_ptr<p2pkv::MemoryRegion>, std::shared_ptr<p2pkv::RemoteRegion>,
                                 std::vector<Span> spans, std::vector<p2pkv::Word>) override {
    auto read = std::make_shared<Read>(air_, std::move(spans), behaviour_);
    const std::lock_guard lock(mutex_);
    reads_.push_back(read);
    return read;
  }
  void close() override {
    const std::lock_guard lock(mutex_);
    for (const auto& read : reads_) read->cancel();
  }

 private:
  // Nobody's letting go of it ends it: it goes on writing until it has settled, or the endpoint is closed.
  class Read : public Transfer {
   public:
    Read(Air& air, std::vector<Span> spans, Behaviour behaviour)
        : air_(air),
          spans_(std::move(spans)),
          outcome_(behaviour.outcome),
          at_(Deadline::Clock::now() + behaviour.after),
          statuses_(spans_.size(), Status::kPending) {
      air_.begin(spans_);
    }
    void cancel() { settle(Status::kCanceled); }
    bool done() override { return advance(0); }
    bool advance(double timeout) override {
      if (is_settled_) return true;
      const auto until = std::min(Deadline::after(timeout).at(), at_);
      while (Deadline::Clock::now() < until) std::this_thread::sleep_until(until);
      if (Deadline::Clock::now() < at_) return false;
      settle(outcome_);
      return true;
    }
    void wait(double timeout) override {
      if (!advance(timeout)) settle(Status::kTimedOut);
    }
    const std::vector<Status>& statuses() const override { return statuses_; }

   private:
    // A call and whoever closes the endpoint may come at once: the second has what the first one wrote.
    void settle(Status status) {
      const std::lock_guard lock(mutex_);
      if (is_settled_) return;
      statuses_.assign(statuses_.size(), status);
      air_.end(spans_);
      is_settled_ = true;
    }
    Air& air_;
    const std::vector<Span> spans_;
    const Status outcome_;
    const Deadline::Clock::time_point at_;
    std::mutex mutex_;  // guards settling
    std::vector<Status> statuses_;
    std::atomic<bool> is_settled_{false};
  };

  Air& air_;
  const Behaviour behaviour_;
  std::mutex mutex_;  // guards the next one
  std::vector<std::shared_ptr<Read>> reads_;
};

constexpr Behaviour kStopped{Status::kOk, std::chrono::hours(1)};

// Eight nodes, and pages of which each lies at some of them.
struct World {
  static constexpr uint64_t kNodes = 8;

  Air air;
  std::mutex mutex;  // guards `behaviours`
  std::map<uint64_t, Behaviour> behaviours;
  std::unique_ptr<PeerConnections> peers;
  Shard shard{1 << 12};
  LocationCache cache{1 << 12, 100.0};
  OtherHolders others{1 << 12};
  Hedges hedges;
  std::vector<LocalMemory> memories{LocalMemory{0, {nullptr, nullptr}}};
  std::unique_ptr<FetchBatch> batch;

  World() {
    PeerConnections::Hooks hooks;
    hooks.open = [this](PeerId peer, size_t, const Deadline&) -> p2pkv::Opened {
      const std::lock_guard lock(mutex);
      return {std::make_shared<Endpoint>(air, behaviours[peer.key]), nullptr};
    };
    hooks.scratch = [](size_t) { return std::make_shared<p2pkv::test::FakeRegion>(); };
    hooks.fell_back = [](PeerId, size_t, PeerConnections::FallBack, bool) {};
    hooks.failed = [](std::exception_ptr) {};
    // A peer that is lost is tried again at once: whether it is there is what these tests change.
    PeerConnections::Timing timing;
    timing.retry_first = timing.avoid = 0;
    timing.patient_connect = 0.01;
    peers = std::make_unique<PeerConnections>(1, timing, std::move(hooks));
    std::vector<uint64_t> owners, boots;
    for (uint64_t key = 1; key <= kNodes; ++key) {
      peers->change({{{key, kBoot}, true, {0}}}, {});
      owners.push_back(key);
      boots.push_back(kBoot);
    }
    shard.set_view(owners.data(), boots.data(), owners.size());
  }

  void behave(uint64_t node, Behaviour behaviour) {
    const std::lock_guard lock(mutex);
    behaviours[node] = behaviour;
  }
  static Location at(uint64_t owner) { return {owner, kBoot, 0, kPage, 64, 2, 0, 0, p2pkv::kResident}; }

  // A batch of pages, the first holder of each first; they were in the location cache if `is_cached`.
  void locate(const std::vector<std::vector<uint64_t>>& holders, bool is_cached = false) {
    std::vector<Key> keys;
    std::vector<Piece> pieces;
    std::vector<Location> first;
    std::vector<int64_t> pages;
    for (size_t page = 0; page < holders.size(); ++page) {
      keys.push_back(key_of(page));
      pieces.push_back({static_cast<int64_t>(page) * kPage, kPage});
      first.push_back(at(holders[page].at(0)));
      pages.push_back(static_cast<int64_t>(page));
      std::vector<Location> rest;
      for (size_t i = 1; i < holders[page].size(); ++i) rest.push_back(at(holders[page][i]));
      others.put(keys.back(), rest.data(), rest.size());
    }
    batch = std::make_unique<FetchBatch>(keys, pieces, std::vector<int32_t>(keys.size()), 1);
    if (is_cached) {
      cache.put(keys.data(), first.data(), keys.size());
      CHECK_EQ(batch->locate_cached(&cache, &shard), keys.size());
    } else {
      const std::vector<uint8_t> found(keys.size(), 1);
      batch->locate(pages.data(), found.data(), first.data(), keys.size(), &shard, &cache);
    }
  }

  // Reads for a round; returns the seconds that it took.
  double read(double seconds, bool may_look_again = false) {
    HolderChoice choice(others, shard, kOwn, [this](uint64_t owner, uint64_t boot) {
      const auto pace = peers->pace_of({owner, boot});
      return pace && pace->is_slow();
    });
    const Flights::Elsewhere elsewhere{choice, hedges, may_look_again};
    const auto began = Deadline::Clock::now();
    {
      Flights flights(*batch, *peers, memories, Deadline::after(seconds), false, &elsewhere);
      flights.read(batch->group_by_owner(kOwn));
    }
    batch->remember_rerouted(&cache, choice);
    CHECK_EQ(air.n_clashes(), 0);
    CHECK_EQ(air.n_written(), 0u);
    return std::chrono::duration<double>(Deadline::Clock::now() - began).count();
  }
  bool is_hit(size_t page) const { return batch->outcomes()[page] != 0; }
  size_t n_hits() const {
    return static_cast<size_t>(std::count(batch->outcomes().begin(), batch->outcomes().end(), 1));
  }
  size_t n_stale(size_t* n_worth = nullptr) {
    std::vector<Key> keys;
    std::vector<Location> locations;
    const size_t worth = batch->forget_stale(kOwn, &cache, &keys, &locations);
    if (n_worth != nullptr) *n_worth = worth;
    return keys.size();
  }
};

TEST(late_holders_are_left_for_the_next) {
  World world;
  world.behave(1, kStopped);
  world.locate({{1, 2}, {1, 3}, {2}, {1, 2}});
  CHECK(world.read(20) < 10);
  CHECK_EQ(world.n_hits(), 4u);
  CHECK_EQ(world.hedges.counts()[Hedges::kLate], 1u);
  for (const auto& [peer, way, amount] : world.peers->traffic()) {
    CHECK_EQ(amount.n_late, peer == 1 ? 1u : 0u);
    if (peer == 1) CHECK(amount.seconds > 0);  // the time that was lost with it is its own
  }
  // For a while the next ones need not find out; on a slow machine they do.
  world.locate({{1, 2}, {1, 3}});
  world.read(20);
  CHECK_EQ(world.n_hits(), 2u);
  CHECK_EQ(world.hedges.counts()[Hedges::kLate] + world.hedges.counts()[Hedges::kSlow], 2u);
  CHECK_EQ(world.n_stale(), 0u);
}

TEST(late_holders_are_the_others_of_who_was_found_instead) {
  World world;
  world.behave(1, kStopped);
  world.locate({{1, 2}});
  world.read(20);
  CHECK_EQ(world.n_hits(), 1u);
  // It goes on, and the other one stops: where the page was found, both of them are known.
  world.behave(1, {});
  world.behave(2, kStopped);
  world.peers->discard(world.peers->borrow({2, kBoot}, Deadline::after(5)));
  world.batch = std::make_unique<FetchBatch>(std::vector<Key>{key_of(0)}, std::vector<Piece>{{0, kPage}},
                                             std::vector<int32_t>{0}, 1);
  CHECK_EQ(world.batch->locate_cached(&world.cache, &world.shard), 1u);
  CHECK_EQ(world.batch->location(0).owner, 2u);
  CHECK(world.read(20) < 10);
  CHECK_EQ(world.n_hits(), 1u);
}

TEST(late_holders_are_tried_again) {
  World world;
  world.behave(1, {Status::kOk, std::chrono::milliseconds(300)});  // far beyond what is late at first
  world.behave(2, {Status::kPeerLost});
  world.behave(3, {Status::kRejected});
  world.locate({{1, 2, 3}});
  world.read(60);
  CHECK_EQ(world.n_hits(), 1u);
}

TEST(late_holders_that_are_all_slow_have_time_in_turn) {
  World world;
  for (const uint64_t node : {1, 2}) world.behave(node, {Status::kOk, std::chrono::milliseconds(400)});
  world.locate({{1, 2}});
  world.read(60);
  CHECK_EQ(world.n_hits(), 1u);
}

TEST(late_holders_are_not_left_where_nobody_else_is_known) {
  World world;
  world.behave(1, {Status::kOk, std::chrono::milliseconds(300)});
  world.locate({{1}, {2}});
  world.read(60, true);
  CHECK_EQ(world.n_hits(), 2u);
  CHECK_EQ(world.hedges.counts()[Hedges::kLate], 0u);
}

TEST(lost_and_stale_holders_are_made_up_for_at_once) {
  World world;
  world.behave(1, {Status::kPeerLost});
  world.behave(2, {Status::kRejected});
  world.locate({{1, 3}, {2, 3}, {2, 1, 4}, {2}});
  CHECK(world.read(20) < 10);
  CHECK(world.is_hit(0) && world.is_hit(1) && world.is_hit(2) && !world.is_hit(3));
  CHECK(!world.batch->is_over());
  CHECK_EQ(world.n_stale(), 3u);  // two of pages that were found elsewhere
  CHECK_EQ(world.n_stale(), 0u);
}

TEST(hedges_are_a_share_of_the_reads) {
  World world;
  Hedges& hedges = world.hedges;
  int n_taken = 0;
  const auto take_all = [&] {
    for (int i = 0; i < 1000; ++i) n_taken += hedges.take() ? 1 : 0;
  };
  take_all();
  CHECK_EQ(n_taken, static_cast<int>(Hedges::kBurst));
  for (int i = 0; i < 10 * Hedges::kReadsAHedge; ++i) hedges.note_read();
  take_all();
  CHECK_EQ(n_taken, static_cast<int>(Hedges::kBurst) + 10);
  // With none left a late holder has a quarter of the time, and is left then.
  world.behave(1, kStopped);
  world.locate({{1, 2}});
  const double seconds = world.read(2);
  CHECK(seconds > 0.4 && seconds < 1.9);
  CHECK_EQ(world.n_hits(), 1u);
  CHECK_EQ(hedges.counts()[Hedges::kOverdue], 1u);
}

TEST(late_pages_that_the_cache_located_are_looked_up_again_at_half_the_time) {
  World world;
  world.behave(1, kStopped);
  for (const bool is_cached : {true, false}) {
    world.locate({{1}, {2}}, is_cached);
    const double seconds = world.read(1, true);
    size_t n_worth = 0;
    CHECK_EQ(world.n_stale(&n_worth), 0u);
    CHECK_EQ(n_worth, is_cached ? 1u : 0u);
    CHECK(is_cached ? seconds < 0.95 : seconds > 0.95);
  }
}

TEST(pages_beside_a_late_one_are_looked_up_again_at_half_the_time) {
  World world;
  world.behave(1, kStopped);
  world.behave(2, {Status::kRejected});
  world.locate({{1}, {2}});
  CHECK(world.read(1, true) < 0.95);
  size_t n_worth = 0;
  CHECK_EQ(world.n_stale(&n_worth), 1u);
  CHECK_EQ(n_worth, 2u);
}

// Holders are stopped, lost, stale, slow and damaged at random; whatever they are, no read may write where
// another one does, and a page that one of its holders has at once is a hit.
TEST(late_holders_hunt) {
  const uint64_t seed = p2pkv::test::seed("late_holders_hunt");
  std::mt19937_64 random(seed);
  for (int round = 0; round < 12; ++round) {
    World world;
    std::set<uint64_t> there;
    for (uint64_t node = 1; node <= World::kNodes; ++node) {
      switch (random() % 6) {
        case 0:
          world.behave(node, kStopped);
          break;
        case 1:
          world.behave(node, {Status::kPeerLost, std::chrono::microseconds(random() % 2000)});
          break;
        case 2:
          world.behave(node, {Status::kRejected, std::chrono::microseconds(random() % 2000)});
          break;
        default:
          world.behave(node, {Status::kOk, std::chrono::microseconds(random() % 5000)});
          there.insert(node);
      }
    }
    std::vector<std::vector<uint64_t>> holders;
    for (size_t page = 0; page < 1 + random() % 12; ++page) {
      std::vector<uint64_t> nodes;
      for (uint64_t node = 1; node <= World::kNodes; ++node) nodes.push_back(node);
      std::shuffle(nodes.begin(), nodes.end(), random);
      nodes.resize(1 + random() % 4);
      holders.push_back(nodes);
    }
    bool is_any_lost = false;
    for (const auto& nodes : holders)
      is_any_lost |=
          std::none_of(nodes.begin(), nodes.end(), [&](auto node) { return there.contains(node); });
    world.locate(holders, random() % 2 == 0);
    const double limit = is_any_lost ? 2.0 : 20.0;
    const double seconds = world.read(limit, random() % 2 == 0);
    CHECK(seconds < limit + 5);
    for (size_t page = 0; page < holders.size(); ++page) {
      const bool is_there = std::any_of(holders[page].begin(), holders[page].end(),
                                        [&](uint64_t node) { return there.contains(node); });
      CHECK(!is_there || world.is_hit(page));
      CHECK(is_there || !world.is_hit(page));
    }
  }
}

}  // namespace
