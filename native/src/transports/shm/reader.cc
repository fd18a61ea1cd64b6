#include "transports/shm/reader.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/copy.h"
#include "base/copy_team.h"
#include "net/packets.h"
#include "page/words.h"

namespace p2pkv::shm {
namespace {

// So much is copied between two looks at whether the local region is still open; it takes 1 to 3 ms.
constexpr uint64_t kSliceBytes = 8 << 20;
// What one done() may move, so that it does not block for long.
constexpr uint64_t kPollBytes = 4 << 20;
// Small spans cost more than their bytes.
constexpr size_t kSliceParts = 1024;
// Larger spans are copied in parts, which two threads can share.
constexpr uint64_t kPartBytes = 512 << 10;

}  // namespace

ShmEndpoint::ShmEndpoint(ShmHome home) : home_(std::move(home)), grant_(home_.server->tokens().new_grant()) {}

std::string ShmEndpoint::make_half() {
  EndpointBlob blob{kEndpointMagic, kFrameVersion, 0, {}, home_.server->tokens().mint(grant_)};
  home_.server->socket_name().copy(blob.socket_name, kSocketNameBytes);
  return to_blob(blob);
}

bool ShmEndpoint::take_half(std::string_view remote, std::string* error) {
  EndpointBlob owner;
  if (!from_blob(remote, kEndpointMagic, &owner, error)) return false;
  owner_ = owner;
  owner_name_.assign(owner.socket_name, strnlen(owner.socket_name, kSocketNameBytes));
  advance();
  return true;
}

std::shared_ptr<RemoteRegion> ShmEndpoint::attach(std::string_view region, std::string* error) {
  RegionBlob blob;
  if (!from_blob(region, kRegionMagic, &blob, error)) return nullptr;
  auto remote = std::make_shared<ShmRemoteRegion>(this, blob.region, blob.nbytes);
  const std::lock_guard lock(mutex_);
  std::erase_if(regions_, [](const auto& known) { return known.expired(); });
  regions_.push_back(remote);
  to_ask_.push_back(remote);
  if (is_bound_ && !is_closed_) advance();
  return remote;
}

std::shared_ptr<Transfer> ShmEndpoint::lend(std::shared_ptr<MemoryRegion> local,
                                            std::shared_ptr<RemoteRegion> remote, std::vector<Span> spans,
                                            std::vector<Word> words, Takes takes) {
  return post(std::move(local), std::move(remote),
              {nullptr, std::move(spans), std::move(words), {}, std::move(takes)});
}

ShmEndpoint::Progress ShmEndpoint::poll_mapping(ShmRemoteRegion& region,
                                                std::shared_ptr<ReadOnlyMapping>* mapping) {
  const std::lock_guard lock(mutex_);
  if (!region.mapping && !region.is_refused && !advance()) return Progress::kLost;
  if (region.is_refused) return Progress::kRefused;
  *mapping = region.mapping;
  return region.mapping ? Progress::kReady : Progress::kWaiting;
}

void ShmEndpoint::wait_for_owner(const Deadline& deadline) {
  const auto [is_greeted, connection] = [this] {
    const std::lock_guard lock(mutex_);
    return std::pair(is_greeted_, connection_.get());
  }();
  if (is_greeted) {
    pollfd fd{connection, POLLIN, 0};
    poll(&fd, 1, deadline.poll_ms());
  } else {
    // The owner's queue of connections is full, and Unix sockets have no event for its end.
    poll(nullptr, 0, std::min(deadline.poll_ms(), 2));
  }
}

bool ShmEndpoint::is_owner_alive() {
  const std::lock_guard lock(mutex_);
  pollfd fd{connection_.get(), POLLRDHUP, 0};
  return poll(&fd, 1, 0) == 0;
}

bool ShmEndpoint::advance() {
  if (is_severed_ || is_closed_) return false;
  const Hello hello{kHelloMagic, kFrameVersion, 0, owner_.token};
  if (!is_greeted_ && !greet_owner(owner_name_, hello, &connection_, &is_greeted_)) return false;
  while (is_greeted_ && !to_ask_.empty()) {
    const RegionRequest request{kRequestMagic, kFrameVersion, 0, to_ask_.front()->id, 0};
    if (send(connection_.get(), &request, sizeof request, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
      if (errno == EAGAIN) break;
      return false;
    }
    to_answer_.push_back(std::move(to_ask_.front()));
    to_ask_.pop_front();
  }
  return !is_greeted_ || take_replies();
}

bool ShmEndpoint::take_replies() {
  while (!to_answer_.empty()) {
    MapReply reply;
    UniqueFd fd;
    const Received received = receive_packet(connection_.get(), &reply, &fd);
    if (received != Received::kPacket) return received == Received::kNothing;
    ShmRemoteRegion& region = *to_answer_.front();
    if (reply.magic != kReplyMagic || reply.region != region.id) return false;
    if (reply.status == static_cast<uint32_t>(MapStatus::kGranted)) {
      // That it can't be mapped says nothing of the pages: this process may have no descriptor or address
      // space left. So the owner counts as lost; that its region is gone only the owner can say.
      if (!fd || reply.nbytes != region.size) return false;
      std::string why;
      region.mapping = home_.mappings->get(owner_name_, region.id, fd.get(), region.size, &why);
      if (!region.mapping) return false;
    } else {
      region.is_refused = true;
    }
    to_answer_.pop_front();
  }
  return true;
}

std::shared_ptr<Batch> ShmEndpoint::make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) {
  return std::make_shared<ShmBatch>(std::static_pointer_cast<ShmEndpoint>(shared_from_this()),
                                    std::static_pointer_cast<ShmRemoteRegion>(std::move(remote)),
                                    std::move(reads));
}

void ShmEndpoint::shutdown_sockets() {
  if (connection_) shutdown(connection_.get(), SHUT_RDWR);
}

void ShmEndpoint::release() {
  home_.server->drop_grant(grant_);
  const std::lock_guard lock(mutex_);
  connection_.reset();
  to_ask_.clear();
  to_answer_.clear();
  for (const auto& known : regions_) {
    if (const auto region = known.lock()) region->mapping.reset();
  }
}

ShmBatch::ShmBatch(std::shared_ptr<ShmEndpoint> endpoint, std::shared_ptr<ShmRemoteRegion> remote,
                   Reads reads)
    : Batch(std::move(reads)), endpoint_(std::move(endpoint)), remote_(std::move(remote)) {}

bool ShmBatch::drive(const Deadline* deadline) {
  if (!mapping_ && !await_mapping(deadline)) return false;
  if (!mapping_) return true;
  const uint64_t slice = deadline ? kSliceBytes : kPollBytes;
  while (next_ < spans_.size()) {
    if (is_aborted() || (deadline && deadline->passed()) || !copy_slice(slice, deadline)) return false;
    if (!deadline && next_ < spans_.size()) return false;
  }
  mapping_.reset();  // a settled transfer must not keep the mapping of a closed endpoint
  return true;
}

// True once it is known what becomes of the batch: mapping_ is there, or the owner refused and all spans are
// settled.
bool ShmBatch::await_mapping(const Deadline* deadline) {
  for (;;) {
    if (is_aborted()) return false;
    const auto progress = endpoint_->poll_mapping(*remote_, &mapping_);
    const bool is_lost = progress == ShmEndpoint::Progress::kLost ||
                         (progress == ShmEndpoint::Progress::kReady && !endpoint_->is_owner_alive());
    if (is_lost) {
      abort(Status::kPeerLost);
      return false;
    }
    if (progress == ShmEndpoint::Progress::kReady) return true;
    if (progress == ShmEndpoint::Progress::kRefused) {
      std::replace(statuses_.begin(), statuses_.end(), Status::kPending, Status::kRejected);
      return true;
    }
    if (!deadline || deadline->passed()) return false;
    endpoint_->wait_for_owner(*deadline);
  }
}

// Copies about `nbytes`, or less if the deadline comes or the batch is aborted. False if the local region was
// closed meanwhile, which aborts the batch.
bool ShmBatch::copy_slice(uint64_t nbytes, const Deadline* deadline) {
  const RegisteredRegion::Use use(*local_);
  if (!use) {
    abort(Status::kCanceled);
    return false;
  }
  const uint64_t n_cut = cut_parts(nbytes);
  const size_t n_made = make_copies({parts_.size(), n_cut, [this](size_t i) { copy_part(parts_[i]); }},
                                    [&] { return is_aborted() || (deadline && deadline->passed()); });
  settle_parts(n_made);
  return true;
}

// The next parts of pending spans, about `nbytes` of them; returns how many bytes that are.
uint64_t ShmBatch::cut_parts(uint64_t nbytes) {
  parts_.clear();
  uint64_t left = nbytes;
  uint64_t offset = n_copied_;
  for (size_t i = next_; i < spans_.size() && left > 0 && parts_.size() < kSliceParts; ++i, offset = 0) {
    if (statuses_[i] != Status::kPending) continue;
    const auto length = static_cast<uint64_t>(spans_[i].length);
    do {
      const uint64_t rest = length - offset;
      parts_.push_back({i, offset, takes_.is_taken(i) ? rest : std::min({kPartBytes, left, rest})});
      offset += parts_.back().nbytes;
      left -= std::min(left, parts_.back().nbytes);
    } while (offset < length && left > 0 && parts_.size() < kSliceParts);
  }
  if (parts_.empty()) next_ = spans_.size();
  return nbytes - left;
}

void ShmBatch::copy_part(const Part& part) {
  const Span& span = spans_[part.span];
  if (takes_.is_taken(part.span)) return takes_.take(takes_.tags[part.span], mapping_->base() + span.remote);
  copy_bytes(local_->base() + span.local + part.offset, mapping_->base() + span.remote + part.offset,
             part.nbytes);
}

// The first `n` parts are copied, by whichever threads: only now may the words be asked whether the spans
// that end in them are good.
void ShmBatch::settle_parts(size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const Part& part = parts_[i];
    next_ = part.span;
    n_copied_ = part.offset + part.nbytes;
    if (n_copied_ < static_cast<uint64_t>(spans_[next_].length)) continue;
    const bool is_good =
        !is_validated(next_) ||
        load_word_after_bytes(mapping_->base() + words_[next_].offset) == words_[next_].value;
    statuses_[next_] = is_good ? Status::kOk : Status::kRejected;
    ++next_;
    n_copied_ = 0;
  }
}

}  // namespace p2pkv::shm
