#include "transports/ucx/reader.h"

#include <algorithm>
#include <cstring>

#include "base/copy.h"

namespace p2pkv::ucx {
namespace {

// Requests on their way at a time: enough for the owner to have the next one at hand when it ends one.
constexpr size_t kMaxAsked = 4;
static_assert(kMaxAsked <= kMaxRequests);
// Looks of one done() at a line where nothing happens, before it says so.
constexpr int kIdlePolls = 4;

}  // namespace

std::string make_blob(Server& server, uint64_t grant) {
  EndpointBlob blob{};
  blob.magic = kEndpointMagic;
  blob.version = kFrameVersion;
  blob.address_nbytes = static_cast<uint16_t>(server.address().size());
  blob.token = server.tokens().mint(grant);
  return to_blob(blob) + server.address();
}

UcxEndpoint::UcxEndpoint(UcxHome home) : home_(std::move(home)), grant_(home_.server->tokens().new_grant()) {}

std::string UcxEndpoint::make_half() {
  return make_blob(*home_.server, grant_);
}

bool UcxEndpoint::take_half(std::string_view remote, std::string* error) {
  EndpointBlob owner;
  if (!from_blob(remote, kEndpointMagic, &owner, error)) return false;
  const bool is_sane = owner.address_nbytes > 0 && remote.size() == sizeof owner + owner.address_nbytes;
  if (!is_sane) {
    *error = "handshake is malformed";
    return false;
  }
  auto context = home_.server->context();
  if (!context) {
    *error = "the transport is closed";
    return false;
  }
  line_.reset(Line::open(std::move(context), remote.substr(sizeof owner), owner.token, error).release());
  return line_ != nullptr;
}

std::shared_ptr<RemoteRegion> UcxEndpoint::attach(std::string_view region, std::string* error) {
  RegionBlob blob;
  if (!from_blob(region, kRegionMagic, &blob, error)) return nullptr;
  return std::make_shared<AttachedRegion>(this, blob.region, blob.nbytes);
}

std::shared_ptr<Batch> UcxEndpoint::make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) {
  return std::make_shared<UcxBatch>(std::static_pointer_cast<UcxEndpoint>(shared_from_this()),
                                    std::move(remote), std::move(reads));
}

void UcxEndpoint::shutdown_sockets() {
  // There is nothing to shut down that another thread may touch: whoever drives the line looks up from it.
  if (line_) line_->wake();
}

void UcxEndpoint::release() {
  home_.server->drop_grant(grant_);
  ThreadOwner<Line> line;
  {
    const std::lock_guard lock(mutex_);
    line = std::move(line_);
  }
  if (line) home_.ender->take(std::move(line));
}

UcxBatch::UcxBatch(std::shared_ptr<UcxEndpoint> endpoint, std::shared_ptr<AttachedRegion> remote, Reads reads)
    : Batch(std::move(reads)), endpoint_(std::move(endpoint)), remote_(std::move(remote)) {
  plan();
}

// Cuts the spans, in order, into requests that an owner takes.
void UcxBatch::plan() {
  uint64_t position = 0;
  for (size_t i = 0; i < spans_.size(); ++i) {
    if (statuses_[i] != Status::kPending) continue;
    const auto nbytes = static_cast<uint64_t>(spans_[i].length);
    const bool is_full = requests_.empty() || requests_.back().end - requests_.back().first == kMaxSpans ||
                         requests_.back().nbytes + nbytes > kMaxRequestBytes;
    if (is_full) requests_.push_back({order_.size(), order_.size(), position, 0});
    order_.push_back(static_cast<uint32_t>(i));
    starts_.push_back(position);
    ++requests_.back().end;
    requests_.back().nbytes += nbytes;
    position += nbytes;
  }
}

void UcxBatch::start() {
  ask();
}

void UcxBatch::ask() {
  while (n_asked_ < requests_.size() && n_asked_ - n_settled_ < kMaxAsked) {
    endpoint_->line_->send(make_ask(n_asked_));
    ++n_asked_;
  }
}

bool UcxBatch::drive(const Deadline* deadline) {
  Line& line = *endpoint_->line_;
  const Line::Listening listening(line, this);
  auto last_event = Deadline::Clock::now();
  for (int idle = 0; !is_aborted();) {
    const bool is_busy = line.progress();
    ask();
    if (is_complete()) break;
    if (line.is_lost() || is_local_closed_) {
      abort(is_local_closed_ ? Status::kCanceled : Status::kPeerLost);
      break;
    }
    const auto now = Deadline::Clock::now();
    if (deadline ? deadline->passed() : (idle += !is_busy) >= kIdlePolls) break;
    if (is_busy) {
      last_event = now;
    } else if (deadline && now - last_event >= kSpin) {
      line.sleep(*deadline);
      last_event = Deadline::Clock::now();
    }
  }
  return is_complete() && !is_aborted();
}

Ask UcxBatch::make_ask(size_t number) const {
  const Request& request = requests_[number];
  Ask ask{{0, number, static_cast<uint32_t>(request.end - request.first), 0}, {}};
  ask.spans.reserve(request.end - request.first);
  for (size_t at = request.first; at < request.end; ++at) {
    const uint32_t i = order_[at];
    const bool wants_word = is_validated(i);
    ask.spans.push_back({remote_->id, wants_word ? 1u : 0u, static_cast<uint64_t>(spans_[i].remote),
                         static_cast<uint64_t>(spans_[i].length), wants_word ? words_[i].offset : 0});
  }
  return ask;
}

bool UcxBatch::take_bytes(const BytesFrame& frame, std::string_view bytes) {
  if (frame.id >= n_asked_) return false;
  Request& request = requests_[frame.id];
  const bool fits = frame.position <= request.nbytes && bytes.size() <= request.nbytes - frame.position;
  // More bytes than there are, counted over all pieces, would let a hole pass for read.
  if (request.is_settled || !fits || bytes.size() > request.nbytes - request.n_arrived) return false;
  const RegisteredRegion::Use use(*local_);
  if (!use) {
    is_local_closed_ = true;
    return true;
  }
  scatter(request.start + frame.position, bytes);
  request.n_arrived += bytes.size();
  return true;
}

void UcxBatch::scatter(uint64_t position, std::string_view bytes) {
  // The last span that starts at or before it; empty ones before it start there as well.
  size_t at =
      static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), position) - starts_.begin()) - 1;
  uint64_t done = position - starts_[at];
  for (; !bytes.empty(); ++at, done = 0) {
    const Span& span = spans_[order_[at]];
    const auto nbytes = std::min<uint64_t>(bytes.size(), static_cast<uint64_t>(span.length) - done);
    if (nbytes > 0) copy_bytes(local_->base() + span.local + done, bytes.data(), nbytes);
    bytes.remove_prefix(nbytes);
  }
}

bool UcxBatch::take_end(const EndFrame& frame, std::string_view words) {
  if (frame.id >= n_asked_ || requests_[frame.id].is_settled) return false;
  if (is_local_closed_) return true;
  Request& request = requests_[frame.id];
  const bool is_gone = frame.status == static_cast<uint32_t>(EndStatus::kRegionGone);
  // Messages of one endpoint come in order, so an end before its bytes is no honest owner's.
  if (!is_gone && request.n_arrived != request.nbytes) return false;
  return words.size() == frame.n_words * sizeof(uint64_t) && settle_request(request, is_gone, words);
}

// False if there are not as many words as were asked for.
bool UcxBatch::settle_request(Request& request, bool is_gone, std::string_view words) {
  for (size_t at = request.first; at < request.end; ++at) {
    const uint32_t i = order_[at];
    Status status = is_gone ? Status::kRejected : Status::kOk;
    if (!is_gone && is_validated(i)) {
      if (words.size() < sizeof(uint64_t)) return false;
      uint64_t word;
      std::memcpy(&word, words.data(), sizeof word);
      words.remove_prefix(sizeof word);
      if (word != words_[i].value) status = Status::kRejected;
    }
    statuses_[i] = status;
  }
  request.is_settled = true;
  ++n_settled_;
  return true;
}

}  // namespace p2pkv::ucx
