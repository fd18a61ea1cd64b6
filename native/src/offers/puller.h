// The threads that pull from one peer. A peer that has stopped holds up nobody else's.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "base/thread.h"
#include "offers/peer_reader.h"

namespace p2pkv::offers {

class Puller {
 public:
  // As many pulls of one peer go on at a time: one large request does not hold up a small one.
  static constexpr size_t kMaxThreads = 2;

  Puller(const std::shared_ptr<Link>& link, const Transfers::Options& options,
         std::atomic<uint64_t>& n_fallbacks)
      : reader_(link, options, n_fallbacks) {}
  ~Puller() { close(); }

  PeerReader& reader() { return reader_; }
  // Runs `work` on one of the threads. What is queued when the puller is stopped is dropped.
  void queue(std::function<void()> work);
  // No further work is begun. Returns at once.
  void stop();
  // Whether `close` would not wait.
  bool has_ended();
  // Waits for the threads.
  void close();

 private:
  void run();

  PeerReader reader_;
  std::mutex mutex_;  // guards all below
  std::condition_variable given_;
  std::deque<std::function<void()>> queue_;
  std::vector<NamedThread> threads_;
  size_t n_idle_ = 0;
  size_t n_running_ = 0;
  bool is_stopped_ = false;
};

}  // namespace p2pkv::offers
