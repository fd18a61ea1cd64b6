// A disk store as Python holds it.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "disk/faulty_files.h"
#include "disk/store.h"
#include "disk/waiting.h"

namespace p2pkv {

// Tickets whose memory is free again: for a tier, or kept until Python asks for them, because native threads
// never call Python.
class ReleasedTickets {
 public:
  using Sink = std::function<void(const uint64_t* tickets, size_t n)>;

  // From now on, and before anything was written, tickets go there. From the writer's thread.
  void hand_to(Sink sink) {
    const std::lock_guard lock(mutex_);
    sink_ = std::move(sink);
  }
  void push(const uint64_t* tickets, size_t n) {
    Sink sink;
    {
      const std::lock_guard lock(mutex_);
      if (!sink_) tickets_.insert(tickets_.end(), tickets, tickets + n);
      sink = sink_;
    }
    if (sink) return sink(tickets, n);
    filled_.notify_all();
  }
  std::vector<uint64_t> drain(size_t max, const Deadline& deadline) {
    std::unique_lock lock(mutex_);
    disk::wait_until(filled_, lock, deadline, [this] { return !tickets_.empty(); });
    const auto end = tickets_.begin() + static_cast<std::ptrdiff_t>(std::min(max, tickets_.size()));
    std::vector<uint64_t> drained(tickets_.begin(), end);
    tickets_.erase(tickets_.begin(), end);
    return drained;
  }

 private:
  std::mutex mutex_;  // guards what follows
  std::condition_variable filled_;
  std::deque<uint64_t> tickets_;
  Sink sink_;
};

// Whom a store tells of pages that it has stored, or, without any, that it has keys to drain: nobody, until a
// tier has it.
class StoreNews {
 public:
  using Listener = std::function<void(const Key* stored, size_t n)>;

  void hand_to(Listener listener) {
    const std::lock_guard lock(mutex_);
    listener_ = std::move(listener);
  }
  void tell(const Key* stored = nullptr, size_t n = 0) {
    Listener listener;
    {
      const std::lock_guard lock(mutex_);
      listener = listener_;
    }
    if (listener) listener(stored, n);
  }

 private:
  std::mutex mutex_;  // guards what follows
  Listener listener_;
};

// A store with what must outlive it.
struct BoundStore {
  std::shared_ptr<StoreNews> news = std::make_shared<StoreNews>();
  std::shared_ptr<ReleasedTickets> released = std::make_shared<ReleasedTickets>();
  std::shared_ptr<disk::FaultyFiles> faults;
  std::shared_ptr<disk::DiskStore> store;
};

}  // namespace p2pkv
