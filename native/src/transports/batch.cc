#include "transports/batch.h"

#include "base/checked.h"

namespace p2pkv {

// Ends a turn that was taken, also if driving throws: a turn that nobody ends would keep the batch's own end
// waiting.
class Batch::Turn {
 public:
  explicit Turn(Batch& batch) : batch_(batch) {}
  ~Turn() { batch_.end_turn(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Batch& batch_;
};

bool Batch::done() {
  if (has_settled()) return true;
  // Another thread is moving the bytes: its progress is ours.
  if (!take_turn(nullptr, false)) return has_settled();
  const Turn turn(*this);
  if (!has_settled() && (drive(nullptr) || is_aborted())) finish();
  return has_settled();
}

bool Batch::advance(double timeout) {
  if (has_settled()) return true;
  const Deadline deadline = Deadline::after(timeout);
  if (!take_turn(&deadline, true)) return has_settled();
  const Turn turn(*this);
  if (!has_settled() && (drive(&deadline) || is_aborted())) finish();
  return has_settled();
}

void Batch::wait(double timeout) {
  if (has_settled()) return;
  const Deadline deadline = Deadline::after(timeout);
  if (!take_turn(&deadline, true)) {
    abort(Status::kTimedOut);
    take_turn(nullptr, true);
  }
  const Turn turn(*this);
  if (has_settled()) return;
  if (!drive(&deadline)) abort(Status::kTimedOut);
  finish();
}

void Batch::abort(Status reason) {
  Status none = Status::kPending;
  if (abort_reason_.compare_exchange_strong(none, reason, std::memory_order_acq_rel)) interrupt();
}

void Batch::settle(Status reason) {
  if (has_settled()) return;
  abort(reason);
  take_turn(nullptr, true);
  const Turn turn(*this);
  if (!has_settled()) finish();
}

// Makes the caller the one thread that drives. Without a deadline it waits as long as it takes, if it may
// block.
bool Batch::take_turn(const Deadline* deadline, bool may_block) {
  std::unique_lock lock(mutex_);
  const auto is_free = [this] { return !is_driven_; };
  if (!may_block) {
    if (is_driven_) return false;
  } else if (deadline == nullptr) {
    turn_ended_.wait(lock, is_free);
  } else if (!turn_ended_.wait_until(lock, deadline->at(), is_free)) {
    return false;
  }
  is_driven_ = true;
  return true;
}

void Batch::end_turn() {
  // Notified under the lock: a waiter may destroy the batch as soon as it has its turn.
  const std::lock_guard lock(mutex_);
  is_driven_ = false;
  turn_ended_.notify_all();
}

void Batch::finish() {
  const Status reason = abort_reason_.load(std::memory_order_acquire);
  if (reason != Status::kPending) {
    quiesce();
    for (Status& status : statuses_) {
      if (status == Status::kPending) status = reason;
    }
  }
  if (n_settled_ != nullptr) {
    n_settled_->fetch_add(1, std::memory_order_release);
    n_settled_->notify_all();
  }
  has_settled_.store(true, std::memory_order_release);  // last: whoever sees it may destroy the batch
}

uint64_t n_pending_bytes(const std::vector<Span>& spans, const std::vector<Status>& statuses) {
  uint64_t total = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    if (statuses[i] == Status::kPending) total += static_cast<uint64_t>(spans[i].length);
  }
  return total;
}

std::vector<std::vector<uint32_t>> split_spans(const std::vector<Span>& spans, const std::vector<Word>& words,
                                               const std::vector<Status>& statuses, size_t n_shares) {
  std::vector<std::vector<uint32_t>> shares(n_shares);
  const uint64_t total = n_pending_bytes(spans, statuses);
  const auto word_of = [&](size_t span) { return words.empty() ? kNoWord : words[span].offset; };
  uint64_t done = 0;
  size_t share = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    if (statuses[i] != Status::kPending) continue;
    const bool is_same_page = i > 0 && word_of(i) != kNoWord && word_of(i) == word_of(i - 1);
    if (!is_same_page && share + 1 < n_shares && done >= total * (share + 1) / n_shares) ++share;
    shares[share].push_back(static_cast<uint32_t>(i));
    done += static_cast<uint64_t>(spans[i].length);
  }
  return shares;
}

std::vector<uint32_t> pending_spans(const std::vector<Status>& statuses) {
  std::vector<uint32_t> pending;
  pending.reserve(statuses.size());
  for (size_t i = 0; i < statuses.size(); ++i) {
    if (statuses[i] == Status::kPending) pending.push_back(static_cast<uint32_t>(i));
  }
  return pending;
}

std::vector<Slice> cut_slices(const std::vector<Span>& spans, const std::vector<Word>& words,
                              const std::vector<uint32_t>& list, uint64_t nbytes) {
  std::vector<Slice> slices;
  const auto word_of = [&](size_t at) { return words.empty() ? kNoWord : words[list[at]].offset; };
  for (size_t at = 0; at < list.size(); ++at) {
    const bool is_same_page = at > 0 && word_of(at) != kNoWord && word_of(at) == word_of(at - 1);
    if (slices.empty() || (slices.back().nbytes >= nbytes && !is_same_page)) slices.push_back({at, at, 0});
    slices.back().end = at + 1;
    slices.back().nbytes += static_cast<uint64_t>(spans[list[at]].length);
  }
  return slices;
}

std::vector<Share> split_list(const std::vector<Span>& spans, const std::vector<Word>& words,
                              const std::vector<uint32_t>& list, size_t n_shares) {
  uint64_t total = 0, done = 0;
  for (const uint32_t span : list) total += static_cast<uint64_t>(spans[span].length);
  std::vector<Share> shares;
  for (const Slice& page : cut_slices(spans, words, list, 0)) {
    if (shares.empty() || (shares.size() < n_shares && done >= total * shares.size() / n_shares)) {
      shares.emplace_back();
    }
    Share& share = shares.back();
    for (size_t i = page.first; i < page.end; ++i) share.spans.push_back(list[i]);
    share.nbytes += page.nbytes;
    done += page.nbytes;
  }
  return shares;
}

std::vector<Status> screen_spans(const std::vector<Span>& spans, const std::vector<Word>& words,
                                 uint64_t local_nbytes, uint64_t remote_nbytes) {
  std::vector<Status> statuses(spans.size(), Status::kPending);
  const auto fits = [](int64_t offset, int64_t length, uint64_t nbytes) {
    return offset >= 0 && length >= 0 &&
           lies_within(static_cast<uint64_t>(offset), static_cast<uint64_t>(length), nbytes);
  };
  for (size_t i = 0; i < spans.size(); ++i) {
    const bool bytes_fit = fits(spans[i].local, spans[i].length, local_nbytes) &&
                           fits(spans[i].remote, spans[i].length, remote_nbytes);
    const bool word_fits =
        words.empty() || words[i].offset == kNoWord || word_lies_within(words[i].offset, remote_nbytes);
    if (!bytes_fit || !word_fits) statuses[i] = Status::kOutOfRange;
  }
  return statuses;
}

}  // namespace p2pkv
