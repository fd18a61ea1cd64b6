#include "transports/ucx/worker.h"

namespace p2pkv::ucx {
namespace {

constexpr std::chrono::seconds kTick{1};

}  // namespace

bool Worker::start(const char* name, std::string* error) {
  if (thread_.start(name, [this] { loop(); })) return true;
  *error = "the system has no thread to give";
  return false;
}

void Worker::post(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    if (is_closing_) return;
    tasks_.push_back(std::move(task));
  }
  wakeup_.set();
}

void Worker::close() {
  if (getpid() != pid_) return;  // in a forked child all of it is the parent's
  const std::lock_guard ending(ending_);
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  wakeup_.set();
  thread_.join();
  if (port_ && hooks_.end) hooks_.end();
  port_.reset();
  wakeup_.close();
}

void Worker::loop() {
  auto last_event = Clock::now();
  for (;;) {
    bool is_busy = run_tasks();
    {
      const std::lock_guard lock(mutex_);
      if (is_closing_ && tasks_.empty()) return;
    }
    is_busy |= port_->progress();
    is_busy |= hooks_.turn();
    const auto now = Clock::now();
    if (now >= next_tick_) {
      next_tick_ = now + kTick;
      hooks_.tick();
    }
    if (is_busy) {
      last_event = now;
    } else if (now - last_event >= kSpin) {
      const auto tick = std::chrono::duration_cast<std::chrono::milliseconds>(kTick).count();
      port_->sleep(wakeup_.fd(), hooks_.is_watchful() ? static_cast<int>(tick) : -1);
      wakeup_.clear();
      last_event = Clock::now();
    }
  }
}

bool Worker::run_tasks() {
  std::vector<std::function<void()>> tasks;
  {
    const std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (auto& task : tasks) task();
  return !tasks.empty();
}

}  // namespace p2pkv::ucx
