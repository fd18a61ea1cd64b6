#include "pool/packing_choice.h"

namespace p2pkv {

bool PackingChoice::is_wanted(uint64_t nbytes) {
  if (packing_ != Packing::kAuto) return packing_ == Packing::kLossless;
  const std::lock_guard lock(mutex_);
  if (is_on_) return true;
  skipped_bytes_ += nbytes;
  if (skipped_bytes_ < kPause * kTrialBytes) return false;
  skipped_bytes_ = 0;
  is_on_ = true;
  return true;
}

void PackingChoice::tried(uint64_t nbytes, uint64_t stored, bool is_packed, uint64_t nanoseconds) {
  const std::lock_guard lock(mutex_);
  for (PackedPages* pages : {&all_, &trial_}) {
    ++pages->n_tried;
    pages->n_packed += is_packed ? 1 : 0;
    pages->tried_bytes += nbytes;
    pages->stored_bytes += stored;
    pages->nanoseconds += nanoseconds;
  }
  if (packing_ != Packing::kAuto) return;
  if (trial_.tried_bytes < kTrialBytes && trial_.n_tried < kTrialPages) return;
  const auto tried = static_cast<double>(trial_.tried_bytes);
  const bool is_smaller = tried >= kLeastRatio * static_cast<double>(trial_.stored_bytes);
  is_on_ = is_smaller && tried >= kLeastSpeed * static_cast<double>(trial_.nanoseconds);
  trial_ = {};
}

PackedPages PackingChoice::pages() {
  const std::lock_guard lock(mutex_);
  PackedPages pages = all_;
  pages.is_on = is_on_;
  return pages;
}

}  // namespace p2pkv
