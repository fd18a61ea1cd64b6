#include "offers/puller.h"

#include <utility>

namespace p2pkv::offers {

void Puller::queue(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  if (is_stopped_) return;
  queue_.push_back(std::move(work));
  if (n_idle_ < queue_.size() && threads_.size() < kMaxThreads) {
    NamedThread thread;
    if (thread.start("p2pkv-pull", [this] { run(); })) {
      ++n_running_;
      threads_.push_back(std::move(thread));
    }
  }
  given_.notify_one();
}

void Puller::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    ++n_idle_;
    given_.wait(lock, [this] { return is_stopped_ || !queue_.empty(); });
    --n_idle_;
    if (is_stopped_) break;
    const auto work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work();
    lock.lock();
  }
  --n_running_;
}

void Puller::stop() {
  std::deque<std::function<void()>> dropped;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  is_stopped_ = true;
  dropped.swap(queue_);
  given_.notify_all();
}

bool Puller::has_ended() {
  const std::lock_guard lock(mutex_);
  return is_stopped_ && n_running_ == 0;
}

void Puller::close() {
  stop();
  for (NamedThread& thread : threads_) thread.join();
  reader_.close();
}

}  // namespace p2pkv::offers
