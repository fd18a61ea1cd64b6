// Lets go of what takes long to let go of: unmapping many GiB takes seconds, and nobody may wait for it.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

#include "base/thread.h"

namespace p2pkv::attaching {

// Thread-safe. What was given away before `close` is gone when that returns.
class Disposer {
 public:
  ~Disposer() { close(); }
  bool start() {
    return thread_.start("p2pkv-dispose", [this] { run(); });
  }
  void take(std::shared_ptr<void> unwanted) {
    {
      const std::lock_guard lock(mutex_);
      unwanted_.push_back(std::move(unwanted));
    }
    changed_.notify_one();
  }
  void close() {
    {
      const std::lock_guard lock(mutex_);
      is_closing_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return is_closing_ || !unwanted_.empty(); });
      if (unwanted_.empty()) return;
      std::shared_ptr<void> next = std::move(unwanted_.front());
      unwanted_.pop_front();
      lock.unlock();
      next.reset();
      lock.lock();
    }
  }

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<void>> unwanted_;
  bool is_closing_ = false;
  NamedThread thread_;
};

}  // namespace p2pkv::attaching
