#include "base/gate.h"

#include <algorithm>

namespace p2pkv {

bool Gate::enter() {
  const std::lock_guard lock(mutex_);
  if (is_shut_) return false;
  inside_.push_back(std::this_thread::get_id());
  return true;
}

bool Gate::leave() {
  const std::lock_guard lock(mutex_);
  const auto own = std::find(inside_.begin(), inside_.end(), std::this_thread::get_id());
  if (own != inside_.end()) {
    *own = inside_.back();
    inside_.pop_back();
  }
  if (is_shut_) left_.notify_all();
  return is_awaited_ && inside_.empty();
}

bool Gate::shut() {
  const std::lock_guard lock(mutex_);
  const bool was_open = !is_shut_;
  is_shut_ = true;
  return was_open;
}

bool Gate::drain() {
  std::unique_lock lock(mutex_);
  const auto own = std::this_thread::get_id();
  left_.wait(lock, [&] {
    return std::all_of(inside_.begin(), inside_.end(), [own](auto id) { return id == own; });
  });
  is_awaited_ = !inside_.empty();
  return !is_awaited_;
}

}  // namespace p2pkv
