#include "transports/verbs/connector.h"

#include <chrono>
#include <utility>

namespace p2pkv::verbs {
namespace {

// So many peers that don't answer ARP hold nobody up (a guess).
constexpr size_t kMaxThreads = 4;

}  // namespace

bool is_known(const Outcome& outcome, double seconds) {
  return outcome.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready;
}

Outcome Connector::connect(Attempt attempt) {
  Queued queued{std::move(attempt), {}};
  Outcome outcome = queued.outcome.get_future().share();
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    queued.outcome.set_value("the transport is closed");
    return outcome;
  }
  queue_.push_back(std::move(queued));
  if (n_idle_ < queue_.size() && threads_.size() < kMaxThreads) {
    NamedThread thread;
    if (thread.start("p2pkv-verbs-in", [this] { run(); })) threads_.push_back(std::move(thread));
  }
  if (threads_.empty()) {
    queue_.back().outcome.set_value("no thread to connect it");
    queue_.pop_back();
  }
  changed_.notify_one();
  return outcome;
}

void Connector::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    ++n_idle_;
    changed_.wait(lock, [this] { return is_closed_ || !queue_.empty(); });
    --n_idle_;
    if (is_closed_) return;
    Queued queued = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    std::string error;
    Attempt& attempt = queued.attempt;
    attempt.pair->connect(attempt.peer, attempt.first_packet, &error);
    // Its maker may wait for this and then close what the pair needs.
    attempt.pair.reset();
    attempt.completions.reset();
    queued.outcome.set_value(std::move(error));
    lock.lock();
  }
}

void Connector::close() {
  std::vector<NamedThread> threads;
  std::deque<Queued> queue;
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    threads.swap(threads_);
    queue.swap(queue_);
    changed_.notify_all();
  }
  for (Queued& queued : queue) queued.outcome.set_value("the transport is closed");
  for (NamedThread& thread : threads) thread.join();
}

}  // namespace p2pkv::verbs
