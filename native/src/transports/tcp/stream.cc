#include "transports/tcp/stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <optional>

#include "base/clock.h"

namespace p2pkv::tcp {
namespace {

constexpr size_t kMaxReceivedPieces = 256;  // at a time; the kernel takes up to 1024, a record has no more
constexpr size_t kSinkBytes = 256 << 10;    // that are dropped at a time

template <typename T>
void append(std::vector<uint8_t>& to, const T& value) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
  to.insert(to.end(), bytes, bytes + sizeof value);
}

const std::vector<Span> kNoBytes = {{0, 0, 0}};
const std::vector<Word> kNoWords;

}  // namespace

void Stream::connect(const Address& address, const LocalAddress* local, const Hello& hello,
                     std::unique_ptr<Wire> wire) {
  socket_ = start_connecting(address, local);
  wire_ = std::move(wire);
  append(outgoing_, hello);
  flush();
}

void Stream::flush() {
  if (!outgoing_.empty()) send_outgoing();
}

void Stream::begin(const ReadPlan& plan, std::vector<uint32_t> share) {
  plan_ = plan;
  abandoned_ = {};
  share_ = std::move(share);
  next_ = 0;
  n_received_ = 0;
  n_requested_ = 0;
  n_bytes_ = 0;
  longest_silence_ns_ = 0;
  asked_ns_ = steady_now_ns();
  if (share_.empty()) return;
  request_next();
  flush();
}

void Stream::ping() {
  ping_status_[0] = Status::kPending;
  begin({nullptr, 0, &kNoBytes, &kNoWords, &ping_status_}, {0});  // a region that is none will do
}

std::vector<uint32_t> Stream::unsettled() const {
  return {share_.begin() + static_cast<std::ptrdiff_t>(next_), share_.end()};
}

uint64_t Stream::n_owed() const {
  uint64_t nbytes = chunk_left_;
  const size_t first = phase_ == Phase::kHeader ? next_ : next_ + chunk_.n_ended;
  for (size_t i = first; i < n_requested_; ++i) nbytes += static_cast<uint64_t>(span(i).length);
  return nbytes - std::min(nbytes, n_received_);
}

void Stream::abandon() {
  Abandoned left;
  for (size_t i = next_; i < n_requested_; ++i) {
    left.spans.push_back(span(i));
    if (!plan_.words->empty()) left.words.push_back((*plan_.words)[share_[i]]);
  }
  left.statuses.assign(left.spans.size(), Status::kPending);
  left.sink.resize(kSinkBytes);
  abandoned_ = std::move(left);
  plan_ = {nullptr, plan_.remote_region, &abandoned_.spans, &abandoned_.words, &abandoned_.statuses};
  at_ -= std::min(at_, next_);
  next_ = 0;
  n_requested_ = abandoned_.spans.size();
  share_.resize(n_requested_);
  std::iota(share_.begin(), share_.end(), 0);
}

bool Stream::has_news() const {
  pollfd fd{socket_.get(), POLLIN, 0};
  return wire_->holds_more() || poll(&fd, 1, 0) > 0;
}

void Stream::hear(uint64_t nbytes) {
  const int64_t now = steady_now_ns();
  longest_silence_ns_ = std::max(longest_silence_ns_, now - std::max(heard_ns(), asked_ns()));
  heard_ns_.store(now, std::memory_order_relaxed);
  n_bytes_.store(n_bytes() + nbytes, std::memory_order_relaxed);
}

Stream::Progress Stream::advance() {
  if (!outgoing_.empty()) {
    const Progress sent = send_outgoing();
    if (sent != Progress::kMoved) return sent;
  }
  return next_ == share_.size() ? Progress::kDone : receive();
}

void Stream::shut_down() {
  if (socket_) shutdown(socket_.get(), SHUT_RDWR);
}

Stream::Progress Stream::send_outgoing() {
  while (n_sent_ < outgoing_.size()) {
    const ssize_t n = send(socket_.get(), outgoing_.data() + n_sent_, outgoing_.size() - n_sent_,
                           MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      // A socket that is still connecting answers EAGAIN as well.
      return errno == EAGAIN ? Progress::kBlocked : Progress::kLost;
    }
    n_sent_ += static_cast<size_t>(n);
  }
  outgoing_.clear();
  n_sent_ = 0;
  return Progress::kMoved;
}

void Stream::request_next() {
  const size_t first = n_requested_;
  n_requested_ = std::min(share_.size(), first + kMaxSpans);
  const auto n_spans = static_cast<uint32_t>(n_requested_ - first);
  const RequestHeader header{kRequestMagic, kFrameVersion, 0, ++request_id_, n_spans, 0};
  requests_.clear();
  for (size_t i = first; i < n_requested_; ++i) {
    const bool wants_word = plan_.is_validated(share_[i]);
    requests_.push_back({plan_.remote_region, wants_word ? 1u : 0u, static_cast<uint64_t>(span(i).remote),
                         static_cast<uint64_t>(span(i).length),
                         wants_word ? (*plan_.words)[share_[i]].offset : 0});
  }
  const bool is_whole = wire_->append(&header, sizeof header, &outgoing_) &&
                        wire_->append(requests_.data(), n_spans * sizeof(SpanRequest), &outgoing_);
  if (!is_whole) shut_down();
  expect_header();
}

void Stream::expect_header() {
  phase_ = Phase::kHeader;
  frame_.resize(sizeof(ChunkHeader));
  n_frame_ = 0;
  chunk_left_ = 0;
}

// Takes what has arrived, bytes straight into local memory and what follows them into frame_.
Stream::Progress Stream::receive() {
  std::array<iovec, kMaxReceivedPieces> pieces;
  const size_t n_pieces = gather(pieces.data());
  size_t n = 0;
  Wire::Progress progress;
  {
    std::optional<RegisteredRegion::Use> use;
    if (plan_.local != nullptr && !use.emplace(*plan_.local)) return Progress::kLocalClosed;
    progress = wire_->receive(socket_.get(), pieces.data(), n_pieces, &n);
  }
  if (progress == Wire::Progress::kBlocked) return Progress::kBlocked;
  if (progress == Wire::Progress::kLost) return Progress::kLost;

  const uint64_t n_bytes = std::min<uint64_t>(chunk_left_, n);
  hear(n_bytes);
  took_bytes(n_bytes);
  n_frame_ += n - n_bytes;
  if (chunk_left_ > 0 || n_frame_ < frame_.size()) return Progress::kMoved;
  const bool is_sane = phase_ == Phase::kHeader ? on_header() : on_trailer();
  if (!is_sane) return Progress::kLost;
  return next_ == share_.size() ? Progress::kDone : Progress::kMoved;
}

size_t Stream::gather(iovec* pieces) {
  size_t n_pieces = 0;
  uint64_t left = chunk_left_;
  if (left > 0 && plan_.local == nullptr) {
    pieces[0] = {abandoned_.sink.data(), std::min<uint64_t>(left, abandoned_.sink.size())};
    return 1;
  }
  for (size_t i = at_; left > 0 && n_pieces < kMaxReceivedPieces; ++i) {
    const uint64_t skip = i == at_ ? at_offset_ : 0;
    const uint64_t nbytes = std::min(left, static_cast<uint64_t>(span(i).length) - skip);
    if (nbytes > 0) pieces[n_pieces++] = {plan_.local->base() + span(i).local + skip, nbytes};
    left -= nbytes;
  }
  // The frame behind the bytes comes with the same system call, unless the bytes need several.
  if (left == 0 && n_pieces < kMaxReceivedPieces) {
    pieces[n_pieces++] = {frame_.data() + n_frame_, frame_.size() - n_frame_};
  }
  return n_pieces;
}

void Stream::took_bytes(uint64_t nbytes) {
  chunk_left_ -= nbytes;
  at_offset_ += nbytes;
  for (; at_ < n_requested_ && at_offset_ >= static_cast<uint64_t>(span(at_).length); ++at_) {
    if (at_offset_ == 0 && chunk_left_ == 0) break;
    at_offset_ -= static_cast<uint64_t>(span(at_).length);
  }
}

// False for an answer that no server of ours gives.
bool Stream::on_header() {
  std::memcpy(&chunk_, frame_.data(), sizeof chunk_);
  const size_t n_open = n_requested_ - next_;
  if (chunk_.magic != kChunkMagic || chunk_.id != request_id_ || chunk_.n_ended > n_open) return false;
  if (chunk_.status == static_cast<uint32_t>(ChunkStatus::kRegionGone)) {
    if (chunk_.n_ended == 0 || chunk_.nbytes != 0) return false;
    n_received_ = 0;
    end_spans(chunk_.n_ended, false);
    return true;
  }
  if (chunk_.status != static_cast<uint32_t>(ChunkStatus::kOk) || chunk_.nbytes > kMaxChunkBytes)
    return false;
  uint64_t n_of_ended = 0;
  size_t n_words = 0;
  for (size_t i = next_; i < next_ + chunk_.n_ended; ++i) {
    n_of_ended += static_cast<uint64_t>(span(i).length) - (i == next_ ? n_received_ : 0);
    n_words += plan_.is_validated(share_[i]) ? 1 : 0;
  }
  if (n_of_ended > chunk_.nbytes || (chunk_.n_ended == 0 && chunk_.nbytes == 0)) return false;
  const uint64_t n_of_next = chunk_.nbytes - n_of_ended;
  if (n_of_next > 0) {
    if (chunk_.n_ended == n_open) return false;
    const uint64_t before = chunk_.n_ended == 0 ? n_received_ : 0;
    if (n_of_next >= static_cast<uint64_t>(span(next_ + chunk_.n_ended).length) - before) return false;
  }
  phase_ = Phase::kBytesAndTrailer;
  frame_.resize(sizeof(ChunkTrailer) + n_words * sizeof(uint64_t));
  n_frame_ = 0;
  chunk_left_ = chunk_.nbytes;
  at_ = next_;
  at_offset_ = n_received_;
  n_received_ =
      n_of_next + (chunk_.n_ended == 0 ? n_received_ : 0);  // of the span that goes on in the next chunk
  return true;
}

bool Stream::on_trailer() {
  ChunkTrailer trailer;
  std::memcpy(&trailer, frame_.data(), sizeof trailer);
  const size_t n_words = (frame_.size() - sizeof trailer) / sizeof(uint64_t);
  const bool is_gone = trailer.status == static_cast<uint32_t>(ChunkStatus::kRegionGone);
  if (trailer.n_words != n_words) return false;
  if (!is_gone && trailer.status != static_cast<uint32_t>(ChunkStatus::kOk)) return false;
  end_spans(chunk_.n_ended, !is_gone);
  return true;
}

// Settles the next spans by the words in frame_ and goes on to what comes after them.
void Stream::end_spans(size_t n_spans, bool is_good) {
  const uint8_t* word_at = frame_.data() + sizeof(ChunkTrailer);
  for (const size_t end = next_ + n_spans; next_ < end; ++next_) {
    bool is_ok = is_good;
    if (is_good && plan_.is_validated(share_[next_])) {
      uint64_t word;
      std::memcpy(&word, word_at, sizeof word);
      word_at += sizeof word;
      is_ok = word == (*plan_.words)[share_[next_]].value;
    }
    (*plan_.statuses)[share_[next_]] = is_ok ? Status::kOk : Status::kRejected;
  }
  if (next_ < n_requested_) {
    expect_header();
  } else if (n_requested_ < share_.size()) {
    request_next();
  }
}

}  // namespace p2pkv::tcp
