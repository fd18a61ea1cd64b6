#include "page/change_log.h"

#include <algorithm>

namespace p2pkv {

void ChangeLog::push(const Key& key, Medium medium, PageEvent event) {
  if (history_) history_->note(key, event);
  if (ring_.size() == 0) return;
  const bool is_stored = event == PageEvent::kStored || event == PageEvent::kWritten;
  const std::lock_guard lock(mutex_);
  if (size_ == ring_.size()) {
    is_lost_ = true;
    size_ = 0;
  }
  ring_[(first_ + size_) % ring_.size()] = {key, medium, is_stored};
  ++size_;
}

void ChangeLog::note_refused(const Key& key, PageEvent event) {
  if (history_) history_->note(key, event);
}

std::vector<Change> ChangeLog::drain(size_t max, bool* is_lost) {
  const std::lock_guard lock(mutex_);
  *is_lost = is_lost_;
  is_lost_ = false;
  std::vector<Change> drained(std::min(max, size_));
  for (Change& change : drained) {
    change = ring_[first_];
    first_ = (first_ + 1) % ring_.size();
  }
  size_ -= drained.size();
  return drained;
}

}  // namespace p2pkv
