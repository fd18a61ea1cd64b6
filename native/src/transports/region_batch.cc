#include "transports/region_batch.h"

#include <algorithm>

namespace p2pkv {
namespace {

// Small spans cost more than their bytes: a call, or the launch of a copy, of a microsecond or two each.
constexpr size_t kSliceParts = 1024;

}  // namespace

bool RegionBatch::drive(const Deadline* deadline) {
  if (!is_begun_ && !await_region(deadline)) return false;
  while (!is_complete()) {
    if (is_aborted() || (deadline && deadline->passed()) || !copy_slice(deadline)) return false;
    if (!deadline && !is_complete()) return false;
  }
  return true;
}

// True once it is known what becomes of the batch: it has begun, or the owner refused and all spans are
// settled.
bool RegionBatch::await_region(const Deadline* deadline) {
  using Progress = RegionEndpoint::Progress;
  for (;;) {
    if (is_aborted()) return false;
    const Progress progress = home_.poll(asked_);
    if (progress == Progress::kLost || (progress == Progress::kReady && !begin())) {
      abort(Status::kPeerLost);
      return false;
    }
    if (progress == Progress::kRefused) settle_rest(Status::kRejected);
    if (progress != Progress::kWaiting) {
      is_begun_ = true;
      return true;
    }
    if (!deadline || deadline->passed()) return false;
    home_.wait_for_owner(*deadline);
  }
}

uint64_t RegionBatch::cut_parts(uint64_t nbytes, uint64_t most) {
  parts_.clear();
  uint64_t left = nbytes;
  uint64_t offset = n_copied_;
  for (size_t i = next_; i < spans_.size() && left > 0 && parts_.size() < kSliceParts; ++i, offset = 0) {
    if (statuses_[i] != Status::kPending) continue;
    const auto length = static_cast<uint64_t>(spans_[i].length);
    do {
      const uint64_t rest = length - offset;
      parts_.push_back({i, offset, takes_.is_taken(i) ? rest : std::min({most, left, rest})});
      offset += parts_.back().nbytes;
      left -= std::min(left, parts_.back().nbytes);
    } while (offset < length && left > 0 && parts_.size() < kSliceParts);
  }
  if (parts_.empty()) next_ = spans_.size();
  return nbytes - left;
}

void RegionBatch::settle_parts(size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const Part& part = parts_[i];
    next_ = part.span;
    n_copied_ = part.offset + part.nbytes;
    if (n_copied_ < static_cast<uint64_t>(spans_[next_].length)) continue;
    const bool is_good = !is_validated(next_) || is_proven(next_);
    statuses_[next_] = is_good ? Status::kOk : Status::kRejected;
    ++next_;
    n_copied_ = 0;
  }
}

void RegionBatch::settle_rest(Status status) {
  std::replace(statuses_.begin(), statuses_.end(), Status::kPending, status);
  next_ = spans_.size();
}

}  // namespace p2pkv
