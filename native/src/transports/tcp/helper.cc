#include "transports/tcp/helper.h"

#include <utility>

namespace p2pkv::tcp {

bool Helper::start() {
  return called_off_.fd() >= 0 && thread_.start("p2pkv-tcp-read", [this] { run(); });
}

void Helper::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
    given_.notify_all();
  }
  thread_.join();
}

void Helper::give(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  is_called_off_ = false;
  called_off_.clear();
  task_ = std::move(task);
  given_.notify_all();
}

void Helper::call_off() {
  is_called_off_ = true;
  called_off_.set();
}

void Helper::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    given_.wait(lock, [this] { return is_closing_ || task_; });
    if (!task_) return;
    const auto task = std::exchange(task_, nullptr);
    lock.unlock();
    task();
    lock.lock();
  }
}

}  // namespace p2pkv::tcp
