// Eight nodes of which each behaves as a test says, and reads of pages that some of them hold.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "cache/flights.h"
#include "cache/holder_spread.h"
#include "check.h"
#include "fake_peers.h"
#include "keys.h"

namespace p2pkv::test {

inline constexpr uint64_t kBoot = 5, kOwn = 99;
inline constexpr int64_t kPage = 16;

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
  bool is_deaf = false;  // nobody gets a connection
};

class Endpoint : public BoundEndpoint {
 public:
  // `behaviour`: of what is read from then on.
  Endpoint(Air& air, std::function<Behaviour()> behaviour) : air_(air), behaviour_(std::move(behaviour)) {}
  std::shared_ptr<Transfer> read(std::shared_ptr<MemoryRegion>, std::shared_ptr<RemoteRegion>,
                                 std::vector<Span> spans, std::vector<Word>) override {
    auto read = std::make_shared<Read>(air_, std::move(spans), behaviour_());
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
  const std::function<Behaviour()> behaviour_;
  std::mutex mutex_;  // guards the next one
  std::vector<std::shared_ptr<Read>> reads_;
};

inline constexpr Behaviour kStopped{Status::kOk, std::chrono::hours(1)};
inline constexpr Behaviour kDeaf{Status::kOk, {}, true};

// Eight nodes, and pages of which each lies at some of them.
struct HolderWorld {
  static constexpr uint64_t kNodes = 8;

  Air air;
  std::mutex mutex;  // guards the next two
  std::map<uint64_t, Behaviour> behaviours;
  bool is_ending = false;
  std::condition_variable ended;
  std::unique_ptr<PeerConnections> peers;
  Shard shard{1 << 12};
  LocationCache cache{1 << 12, 100.0};
  OtherHolders others{1 << 12};
  Hedges hedges;
  std::optional<uint64_t> draw;  // of reads; none: each page is read from its first holder
  std::vector<LocalMemory> memories{LocalMemory{0, {nullptr, nullptr}}};
  std::unique_ptr<FetchBatch> batch;

  HolderWorld() {
    PeerConnections::Hooks hooks;
    hooks.open = [this](PeerId peer, size_t, const Deadline& deadline) -> Opened {
      std::unique_lock lock(mutex);
      if (behaviours[peer.key].is_deaf) {
        ended.wait_until(lock, deadline.at(), [this] { return is_ending; });
        return {};
      }
      const auto behaviour = [this, peer] {
        const std::lock_guard reading(mutex);
        return behaviours[peer.key];
      };
      return {std::make_shared<Endpoint>(air, behaviour), nullptr};
    };
    hooks.scratch = [](size_t) { return std::make_shared<FakeRegion>(); };
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

  ~HolderWorld() {
    {
      const std::lock_guard lock(mutex);
      is_ending = true;
    }
    ended.notify_all();
    peers->close();
  }
  HolderWorld(const HolderWorld&) = delete;
  HolderWorld& operator=(const HolderWorld&) = delete;

  void suspect(uint64_t node, bool is_suspected) { peers->change({{{node, kBoot}, !is_suspected, {0}}}, {}); }
  // Whether it is read where a fetch's draw falls on it: one whose connection took long to make is passed
  // over for a while, as one that was late is.
  bool is_ready(uint64_t node) const {
    const auto standing = peers->standings({{node, kBoot}})[0];
    return standing.is_connected && !standing.pace->is_slow();
  }
  void behave(uint64_t node, Behaviour behaviour) {
    const std::lock_guard lock(mutex);
    behaviours[node] = behaviour;
  }
  static Location at(uint64_t owner) { return {owner, kBoot, 0, kPage, 64, 2, 0, 0, kResident}; }

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

  // Reads pages of these holders until all of these owners are ready.
  void warm(const std::vector<uint64_t>& owners, const std::vector<std::vector<uint64_t>>& holders) {
    const auto are_ready = [&] {
      return std::all_of(owners.begin(), owners.end(), [this](uint64_t node) { return is_ready(node); });
    };
    for (const auto until = Deadline::after(60); !are_ready() && !until.passed();) {
      locate(holders);
      read(20);
    }
    CHECK(are_ready());
  }

  // Reads for a round; returns the seconds that it took.
  double read(double seconds, bool may_look_again = false) {
    HolderChoice choice(others, shard, kOwn, [this](uint64_t owner, uint64_t boot) {
      return HolderChoice::later_by(peers->standings({{owner, boot}}).front());
    });
    const Flights::Elsewhere elsewhere{choice, hedges, may_look_again};
    if (draw) {
      HolderSpread spread((*draw)++,
                          [this](const std::vector<PeerId>& holders) { return peers->standings(holders); });
      batch->spread(choice, spread);
      for (const PeerId& peer : spread.to_connect()) peers->connect_ahead(peer);
    }
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

}  // namespace p2pkv::test
