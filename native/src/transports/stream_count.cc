#include "transports/stream_count.h"

#include <algorithm>

namespace p2pkv {

StreamCount::StreamCount(size_t most, size_t first)
    : most_(std::clamp<size_t>(most, 1, kMost)), in_use_(std::clamp<size_t>(first, 1, most_)) {}

size_t StreamCount::in_use() const {
  const std::lock_guard lock(mutex_);
  return in_use_;
}

size_t StreamCount::to_open() const {
  const std::lock_guard lock(mutex_);
  return std::max(in_use_, tried());
}

size_t StreamCount::tried() const {
  if (trial_ == Trial::kMore) return in_use_ + 1;
  return trial_ == Trial::kFewer ? in_use_ - 1 : in_use_;
}

size_t StreamCount::next(size_t n_open) {
  const std::lock_guard lock(mutex_);
  if (trial_ == Trial::kNone && ++n_batches_ >= trial_after_) {
    n_batches_ = 0;
    usual_ = other_ = {};
    const bool may_grow = in_use_ < most_, may_shrink = in_use_ > 1;
    const bool grows = may_grow && (was_fewer_ || !may_shrink);
    if (grows || may_shrink) trial_ = grows ? Trial::kMore : Trial::kFewer;
    was_fewer_ = !grows;
  }
  is_others_turn_ = trial_ != Trial::kNone && !is_others_turn_;
  const size_t wanted = is_others_turn_ ? tried() : in_use_;
  return std::min(wanted, n_open);
}

void StreamCount::took(size_t n, double ns_per_byte) {
  const std::lock_guard lock(mutex_);
  if (trial_ == Trial::kNone || (n != in_use_ && n != tried())) return;
  Seen& seen = n == in_use_ ? usual_ : other_;
  seen.best = seen.n == 0 ? ns_per_byte : std::min(seen.best, ns_per_byte);
  ++seen.n;
  if (usual_.n >= kTrialBatches && other_.n >= kTrialBatches) end_trial();
}

void StreamCount::end_trial() {
  const Seen& more = trial_ == Trial::kMore ? other_ : usual_;
  const Seen& fewer = trial_ == Trial::kMore ? usual_ : other_;
  const bool more_pays = more.best * kGain <= fewer.best;
  const bool has_changed = more_pays == (trial_ == Trial::kMore);
  if (has_changed) in_use_ = tried();
  trial_after_ = has_changed ? kTrialEvery : std::min(2 * trial_after_, kTrialEveryMost);
  trial_ = Trial::kNone;
}

}  // namespace p2pkv
