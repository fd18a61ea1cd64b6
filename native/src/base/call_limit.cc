#include "base/call_limit.h"

#include <algorithm>
#include <chrono>

namespace p2pkv {

namespace {

// Between looks whether who waits gives up.
constexpr auto kLook = std::chrono::milliseconds(50);

}  // namespace

bool CallLimit::enter(const Deadline& deadline, const std::function<bool()>& gives_up) {
  std::unique_lock lock(mutex_);
  if (!is_closed_ && n_left_ > 0) {
    --n_left_;
    return true;
  }
  const auto own = waiting_.emplace(waiting_.end());
  const auto is_over = [&] { return own->is_in || is_closed_ || deadline.passed(); };
  bool has_given_up = false;
  while (!has_given_up && !is_over()) {
    if (!gives_up) {
      own->changed.wait_until(lock, deadline.at());
      continue;
    }
    if (own->changed.wait_until(lock, std::min(deadline.at(), Deadline::Clock::now() + kLook), is_over))
      continue;
    lock.unlock();  // it may take its time, and close this; the place in the row stays
    has_given_up = gives_up();
    lock.lock();
  }
  const bool is_in = own->is_in;
  waiting_.erase(own);
  if (!is_in && !has_given_up) ++n_refused_;
  return is_in;
}

void CallLimit::leave() {
  const std::lock_guard lock(mutex_);
  if (!is_closed_) {
    for (Waiter& waiter : waiting_) {
      if (waiter.is_in) continue;  // it has a place, and has not woken yet
      waiter.is_in = true;
      waiter.changed.notify_one();
      return;
    }
  }
  ++n_left_;
}

void CallLimit::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  for (Waiter& waiter : waiting_) waiter.changed.notify_one();
}

uint64_t CallLimit::n_refused() {
  const std::lock_guard lock(mutex_);
  return n_refused_;
}

size_t CallLimit::n_waiting() {
  const std::lock_guard lock(mutex_);
  size_t n = 0;
  for (const Waiter& waiter : waiting_) n += waiter.is_in ? 0 : 1;
  return n;
}

}  // namespace p2pkv
