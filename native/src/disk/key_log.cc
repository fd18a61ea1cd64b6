#include "disk/key_log.h"

#include <algorithm>

#include "disk/waiting.h"

namespace p2pkv::disk {

void KeyLog::push(const Key* keys, size_t n) {
  if (n == 0) return;
  {
    const std::lock_guard lock(mutex_);
    keys_.insert(keys_.end(), keys, keys + n);
    if (keys_.size() > capacity_) {
      const size_t excess = keys_.size() - capacity_;
      keys_.erase(keys_.begin(), keys_.begin() + static_cast<std::ptrdiff_t>(excess));
      n_lost_ += excess;
    }
  }
  filled_.notify_one();
}

std::vector<Key> KeyLog::drain(size_t max, const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  wait_until(filled_, lock, deadline, [this] { return !keys_.empty() || is_closed_; });
  const auto end = keys_.begin() + static_cast<std::ptrdiff_t>(std::min(max, keys_.size()));
  std::vector<Key> drained(keys_.begin(), end);
  keys_.erase(keys_.begin(), end);
  return drained;
}

void KeyLog::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
  }
  filled_.notify_all();
}

uint64_t KeyLog::n_lost() const {
  const std::lock_guard lock(mutex_);
  return n_lost_;
}

}  // namespace p2pkv::disk
