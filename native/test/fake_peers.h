// Peers that are reached at once, or as a test says, and a memory of what was done to their endpoints.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "peers/peer_connections.h"

namespace p2pkv::test {

// What becomes of every span read over an endpoint; kPending: nothing, until it is closed or waited for.
class FakeEndpoint : public BoundEndpoint {
 public:
  explicit FakeEndpoint(Status outcome, bool throws = false) : outcome_(outcome), throws_(throws) {}

  std::shared_ptr<Transfer> read(std::shared_ptr<MemoryRegion>, std::shared_ptr<RemoteRegion>,
                                 std::vector<Span> spans, std::vector<Word>) override {
    if (throws_) throw std::runtime_error("thrown on purpose");
    ++n_reads;
    return std::make_shared<FakeTransfer>(*this, spans.size());
  }
  void close() override {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    closed_.notify_all();
  }
  bool is_closed() {
    const std::lock_guard lock(mutex_);
    return is_closed_;
  }

  std::atomic<int> n_reads{0};

 private:
  class FakeTransfer : public Transfer {
   public:
    FakeTransfer(FakeEndpoint& endpoint, size_t n) : endpoint_(endpoint), statuses_(n, endpoint.outcome_) {}
    bool done() override { return advance(0); }
    bool advance(double timeout) override {
      if (endpoint_.outcome_ != Status::kPending) return true;
      if (!endpoint_.wait_closed(timeout)) return false;
      settle(Status::kCanceled);
      return true;
    }
    void wait(double timeout) override {
      if (!advance(timeout)) settle(Status::kTimedOut);
    }
    const std::vector<Status>& statuses() const override { return statuses_; }

   private:
    void settle(Status status) { statuses_.assign(statuses_.size(), status); }
    FakeEndpoint& endpoint_;
    std::vector<Status> statuses_;
  };

  bool wait_closed(double timeout) {
    std::unique_lock lock(mutex_);
    return closed_.wait_until(lock, Deadline::after(timeout).at(), [this] { return is_closed_; });
  }

  const Status outcome_;
  const bool throws_;
  std::mutex mutex_;  // guards all below
  std::condition_variable closed_;
  bool is_closed_ = false;
};

class FakeRegion : public MemoryRegion {
 public:
  uint8_t* base() const override { return nullptr; }
  uint64_t nbytes() const override { return 1 << 20; }
  std::string describe() const override { return {}; }
  void close() override {}
};

// Connections of a node with two transports to peers 1 to 4, in boot 5. Times are short, for tests to see
// them.
struct FakePeers {
  static constexpr uint64_t kBoot = 5;
  static constexpr size_t kWays = 2;
  using Open =
      std::function<std::shared_ptr<FakeEndpoint>(PeerId peer, size_t way, const Deadline& deadline)>;

  explicit FakePeers(Open open, PeerConnections::Timing timing = {}) : open(std::move(open)) {
    PeerConnections::Hooks hooks;
    hooks.open = [this](PeerId peer, size_t way, const Deadline& deadline) -> Opened {
      ++n_opened;
      auto endpoint = this->open(peer, way, deadline);
      if (endpoint) {
        const std::lock_guard lock(mutex);
        endpoints.push_back(endpoint);
      }
      return {endpoint, nullptr};
    };
    hooks.scratch = [](size_t) { return std::make_shared<FakeRegion>(); };
    hooks.fell_back = [this](PeerId, size_t, PeerConnections::FallBack, bool is_first) {
      ++n_fallbacks;
      n_first_fallbacks += is_first ? 1 : 0;
    };
    hooks.failed = [this](std::exception_ptr) { ++n_failed; };
    connections = std::make_unique<PeerConnections>(kWays, timing, std::move(hooks));
    for (uint64_t key = 1; key <= 4; ++key) connections->change({member(key)}, {});
  }

  static PeerConnections::Member member(uint64_t key, uint64_t boot = kBoot, bool is_healthy = true) {
    return {{key, boot}, is_healthy, {0, 1}};
  }
  static PeerId peer(uint64_t key) { return {key, kBoot}; }
  PeerConnections::ConnectionPtr borrow(uint64_t key, double seconds = 5) {
    return connections->borrow(peer(key), Deadline::after(seconds));
  }
  size_t n_closed() {
    const std::lock_guard lock(mutex);
    size_t n = 0;
    for (const auto& endpoint : endpoints) n += endpoint->is_closed() ? 1 : 0;
    return n;
  }

  const Open open;
  std::atomic<int> n_opened{0}, n_fallbacks{0}, n_first_fallbacks{0}, n_failed{0};
  std::mutex mutex;  // guards the next one
  std::vector<std::shared_ptr<FakeEndpoint>> endpoints;
  std::unique_ptr<PeerConnections> connections;
};

inline std::shared_ptr<FakeEndpoint> open_good(PeerId, size_t, const Deadline&) {
  return std::make_shared<FakeEndpoint>(Status::kOk);
}

}  // namespace p2pkv::test
