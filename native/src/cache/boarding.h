// Connections that are being made for one fetch, on threads of their own.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "cache/fetch_batch.h"
#include "cache/flights.h"

namespace p2pkv {

// What comes when the fetch is over, or when it has left the owner, goes back, for others to use.
class Flights::Boarding : public std::enable_shared_from_this<Flights::Boarding> {
 public:
  struct Boarded {
    const FetchBatch::Owner* owner;
    PeerConnections::Borrowed borrowed;
  };
  struct Waiting {
    const FetchBatch::Owner* owner;
    Clock::time_point began;
    Clock::time_point late_at;
  };

  explicit Boarding(PeerConnections& peers) : peers_(peers) {}

  // Has the owner connected to, which was begun then; `take` tells when it is.
  void begin(const FetchBatch::Owner& owner, const Deadline& deadline, Clock::time_point began,
             Clock::time_point late_at) {
    waiting_.push_back({&owner, began, late_at});
    const auto then = [self = shared_from_this(), &owner](PeerConnections::Borrowed borrowed) {
      self->connected(owner, std::move(borrowed));
    };
    peers_.borrow_later({owner.key, owner.boot}, deadline, then);
  }

  // Who is connected now, or can't be; none if that takes longer. Throws what connecting threw.
  std::optional<Boarded> take(double timeout) {
    std::unique_lock lock(mutex_);
    const Deadline deadline = Deadline::after(timeout);
    if (!came_.wait_until(lock, deadline.at(), [this] { return !ready_.empty(); })) return std::nullopt;
    Boarded boarded = std::move(ready_.front());
    ready_.pop_front();
    forget(boarded.owner);
    if (boarded.borrowed.error) std::rethrow_exception(boarded.borrowed.error);
    return boarded;
  }

  // Waits for this owner no more. False: it is connected by now, and to be taken.
  bool leave(const FetchBatch::Owner* owner) {
    const std::lock_guard lock(mutex_);
    const auto is_it = [owner](const Boarded& boarded) { return boarded.owner == owner; };
    if (std::any_of(ready_.begin(), ready_.end(), is_it)) return false;
    forget(owner);
    left_.push_back(owner);
    return true;
  }

  // Has it looked at again at another time whether the owner is late.
  void look_at(const FetchBatch::Owner* owner, Clock::time_point at) {
    for (Waiting& waiting : waiting_) {
      if (waiting.owner == owner) waiting.late_at = at;
    }
  }

  const std::vector<Waiting>& waiting() const { return waiting_; }

  // Waits for nobody any more.
  void end() {
    std::deque<Boarded> unused;
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
      unused.swap(ready_);
    }
    for (const Boarded& boarded : unused) {
      if (boarded.borrowed.connection) peers_.give_back(boarded.borrowed.connection);
    }
  }

 private:
  void connected(const FetchBatch::Owner& owner, PeerConnections::Borrowed borrowed) {
    {
      const std::lock_guard lock(mutex_);
      if (!is_over_ && std::find(left_.begin(), left_.end(), &owner) == left_.end()) {
        ready_.push_back({&owner, std::move(borrowed)});
        came_.notify_one();
        return;
      }
    }
    if (borrowed.connection) peers_.give_back(borrowed.connection);
  }

  void forget(const FetchBatch::Owner* owner) {
    std::erase_if(waiting_, [owner](const Waiting& waiting) { return waiting.owner == owner; });
  }

  PeerConnections& peers_;
  std::vector<Waiting> waiting_;  // of the thread that fetches
  std::mutex mutex_;              // guards all below
  std::condition_variable came_;
  std::deque<Boarded> ready_;
  std::vector<const FetchBatch::Owner*> left_;
  bool is_over_ = false;
};

}  // namespace p2pkv
