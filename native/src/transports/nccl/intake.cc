#include "transports/nccl/intake.h"

#include <algorithm>
#include <cstring>

#include "base/copy.h"

namespace p2pkv::nccl {

Intake::Intake(Wanted wanted) : wanted_(std::move(wanted)), n_left_(wanted_.spans.size(), 0) {
  plan();
}

// Cuts the spans, in order, into requests that an owner takes.
void Intake::plan() {
  for (uint32_t i = 0; i < wanted_.spans.size(); ++i) {
    if (wanted_.statuses[i] != Status::kPending) continue;
    const auto nbytes = static_cast<uint64_t>(wanted_.spans[i].length);
    for (uint64_t skip = 0; skip < nbytes || skip == 0; skip += kMaxRequestBytes) {
      const uint64_t part = std::min(nbytes - skip, kMaxRequestBytes);
      const bool is_full = requests_.empty() || requests_.back().end - requests_.back().first == kMaxSpans ||
                           requests_.back().nbytes + part > kMaxRequestBytes;
      if (is_full) requests_.push_back({pieces_.size(), pieces_.size(), 0});
      pieces_.push_back({i, skip, part});
      ++requests_.back().end;
      requests_.back().nbytes += part;
      ++n_left_[i];
    }
  }
}

std::vector<SpanRequest> Intake::spans_of(size_t number) const {
  const Request& request = requests_[number];
  std::vector<SpanRequest> spans;
  spans.reserve(request.end - request.first);
  for (size_t at = request.first; at < request.end; ++at) {
    const Piece& piece = pieces_[at];
    const bool wants = wants_word(piece);
    const auto offset = static_cast<uint64_t>(wanted_.spans[piece.span].remote) + piece.skip;
    spans.push_back({wanted_.remote, wants ? 1u : 0u, offset, piece.nbytes,
                     wants ? wanted_.words[piece.span].offset : 0});
  }
  return spans;
}

bool Intake::land(size_t number, const uint8_t* bytes, std::string_view words) {
  const Request& request = requests_[number];
  size_t n_words = 0;
  for (size_t at = request.first; at < request.end; ++at) n_words += wants_word(pieces_[at]) ? 1 : 0;
  if (words.size() != n_words * sizeof(uint64_t)) return false;
  const std::lock_guard lock(mutex_);
  if (is_closed_) return true;
  const RegisteredRegion::Use use(*wanted_.local);
  if (!use) {
    is_local_closed_ = true;
    changed_.notify_all();
    return true;
  }
  for (size_t at = request.first; at < request.end; bytes += pieces_[at++].nbytes) {
    const Piece& piece = pieces_[at];
    if (!take_word(piece, &words)) {
      wanted_.statuses[piece.span] = Status::kRejected;
    } else if (piece.nbytes > 0) {
      const auto local = static_cast<uint64_t>(wanted_.spans[piece.span].local) + piece.skip;
      copy_bytes(wanted_.local->base() + local, bytes, piece.nbytes);
    }
  }
  settle(request);
  return true;
}

// Whether the piece's word, if it wants one, is what it must be.
bool Intake::take_word(const Piece& piece, std::string_view* words) {
  if (!wants_word(piece)) return true;
  uint64_t word;
  std::memcpy(&word, words->data(), sizeof word);
  words->remove_prefix(sizeof word);
  return word == wanted_.words[piece.span].value;
}

void Intake::reject(size_t number) {
  const std::lock_guard lock(mutex_);
  const Request& request = requests_[number];
  for (size_t at = request.first; at < request.end; ++at)
    wanted_.statuses[pieces_[at].span] = Status::kRejected;
  settle(request);
}

// With the lock.
void Intake::settle(const Request& request) {
  for (size_t at = request.first; at < request.end; ++at) {
    const uint32_t span = pieces_[at].span;
    Status& status = wanted_.statuses[span];
    if (--n_left_[span] == 0 && status == Status::kPending) status = Status::kOk;
  }
  ++n_settled_;
  if (n_settled_ == requests_.size()) changed_.notify_all();
}

void Intake::lose() {
  const std::lock_guard lock(mutex_);
  is_lost_ = true;
  changed_.notify_all();
}

Intake::State Intake::wait(const Deadline* deadline) {
  std::unique_lock lock(mutex_);
  if (deadline != nullptr) {
    changed_.wait_until(lock, deadline->at(), [this] { return is_woken_ || state() != State::kPending; });
  }
  return state();
}

// With the lock.
Intake::State Intake::state() const {
  if (n_settled_ == requests_.size()) return State::kComplete;
  if (is_local_closed_) return State::kLocalClosed;
  return is_lost_ ? State::kLost : State::kPending;
}

void Intake::wake() {
  const std::lock_guard lock(mutex_);
  is_woken_ = true;
  changed_.notify_all();
}

void Intake::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
}

bool Intake::is_closed() {
  const std::lock_guard lock(mutex_);
  return is_closed_;
}

std::vector<Status> Intake::statuses() {
  const std::lock_guard lock(mutex_);
  return wanted_.statuses;
}

}  // namespace p2pkv::nccl
