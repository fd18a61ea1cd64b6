#include "transports/cuda_ipc/reader.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "net/packets.h"
#include "page/words.h"

namespace p2pkv::cuda_ipc {
namespace {

// A copy that was begun can't be called back, so a slice is made to take about as long as this.
constexpr std::chrono::duration<double> kSliceTakes{0.002};
// Of the first slice, whose speed nobody knows; and at most.
constexpr uint64_t kFirstSlice = 8 << 20;
constexpr uint64_t kLargestSlice = 1 << 30;
// Launching a copy takes a microsecond or two, however little it copies.
constexpr size_t kSliceParts = 1024;
// What can't be mapped is not tried again for so long; the driver may have been short of something.
constexpr std::chrono::seconds kUnmappable{1};

bool has_hung_up(const Connection& connection) {
  pollfd end{connection.fd(), POLLRDHUP, 0};
  return poll(&end, 1, 0) != 0;
}

}  // namespace

DeviceEndpoint::DeviceEndpoint(CudaIpcHome home)
    : home_(std::move(home)), grant_(home_.server->tokens().new_grant()) {}

// The transport puts the host's half into it.
std::string DeviceEndpoint::make_half() {
  EndpointBlob blob{kEndpointMagic, kFrameVersion, 0, {}, {}, home_.server->tokens().mint(grant_)};
  home_.server->socket_name().copy(blob.socket_name, kSocketNameBytes);
  return to_blob(blob);
}

bool DeviceEndpoint::take_half(std::string_view remote, std::string* error) {
  if (!from_blob(remote, kEndpointMagic, &owner_, error)) return false;
  owner_name_.assign(owner_.socket_name, strnlen(owner_.socket_name, kSocketNameBytes));
  advance();
  return true;
}

std::shared_ptr<RemoteRegion> DeviceEndpoint::attach(std::string_view region, std::string* error) {
  RegionBlob blob;
  if (!from_blob(region, kRegionMagic, &blob, error)) return nullptr;
  auto remote = std::make_shared<DeviceRegion>(this, blob.region, blob.nbytes);
  const std::lock_guard lock(mutex_);
  std::erase_if(regions_, [](const auto& known) { return known.expired(); });
  regions_.push_back(remote);
  to_ask_.push_back(remote);
  if (is_bound_ && !is_closed_) advance();
  return remote;
}

DeviceEndpoint::Progress DeviceEndpoint::poll(DeviceRegion& region) {
  const std::lock_guard lock(mutex_);
  if (!region.is_answered && !advance()) return Progress::kLost;
  if (region.is_refused) return Progress::kRefused;
  return region.is_answered ? Progress::kReady : Progress::kWaiting;
}

std::shared_ptr<Mapped> DeviceEndpoint::mapping(DeviceRegion& region,
                                                const std::shared_ptr<cuda::Device>& device, bool* is_lost) {
  std::shared_ptr<Hold> hold;
  cuda::SharedRange range;
  int fd;
  {
    const std::lock_guard lock(mutex_);
    *is_lost = is_severed_ || !hold_;
    if (*is_lost || Clock::now() < region.unmappable_until) return nullptr;
    hold = hold_;
    range = region.range;
    fd = region.fd.get();  // stays open with the region, which the batch has
  }
  // Kept open meanwhile: its end tells the owner that nothing is mapped.
  const auto connection = hold->connection();
  *is_lost = !connection || has_hung_up(*connection);
  if (*is_lost) return nullptr;
  if (auto mapped = hold->find(region.id, device->ordinal())) return mapped;
  std::string why;
  auto memory = cuda::MappedMemory::map(device, range, fd, region.size, &why);
  if (memory) {
    auto mapped = hold->keep(region.id, device->ordinal(), std::move(memory));
    *is_lost = !mapped;
    return mapped;
  }
  const std::lock_guard lock(mutex_);
  region.unmappable_until = Clock::now() + kUnmappable;
  return nullptr;
}

void DeviceEndpoint::wait_for_owner(const Deadline& deadline) {
  std::shared_ptr<Connection> connection;
  {
    const std::lock_guard lock(mutex_);
    if (hold_) connection = hold_->connection();
  }
  if (connection) {
    pollfd fd{connection->fd(), POLLIN, 0};
    ::poll(&fd, 1, deadline.poll_ms());
  } else {
    // The owner's queue of connections is full, and Unix sockets have no event for its end.
    ::poll(nullptr, 0, std::min(deadline.poll_ms(), 2));
  }
}

bool DeviceEndpoint::advance() {
  if (is_severed_ || is_closed_) return false;
  const Hello hello{kHelloMagic, kFrameVersion, 0, owner_.token};
  if (!is_greeted_ && !greet_owner(owner_name_, hello, &connecting_, &is_greeted_)) return false;
  if (!is_greeted_) return true;
  if (!hold_) {
    hold_ = std::make_shared<Hold>(std::move(connecting_));
    home_.hang_ups->watch(hold_);
  }
  const auto connection = hold_->connection();
  if (!connection) return false;
  while (!to_ask_.empty()) {
    const RegionRequest request{kRequestMagic, kFrameVersion, 0, to_ask_.front()->id, 0};
    if (!send_packet(connection->fd(), request)) {
      if (errno == EAGAIN) break;
      return false;
    }
    to_answer_.push_back(std::move(to_ask_.front()));
    to_ask_.pop_front();
  }
  return take_replies(connection->fd());
}

bool DeviceEndpoint::take_replies(int connection) {
  while (!to_answer_.empty()) {
    bool is_complete = false;
    if (!take_reply(*to_answer_.front(), connection, &is_complete)) return false;
    if (!is_complete) return true;
    to_answer_.front()->is_answered = true;
    to_answer_.pop_front();
  }
  return true;
}

// False for an owner that is lost, or says what can't be.
bool DeviceEndpoint::take_reply(DeviceRegion& region, int connection, bool* is_complete) {
  if (!region.wants_words) {
    ShareReply reply;
    const Received received = receive_packet(connection, &reply, &region.fd);
    if (received != Received::kPacket) return received == Received::kNothing;
    if (reply.magic != kReplyMagic || reply.region != region.id) return false;
    region.is_refused = reply.status != static_cast<uint32_t>(ShareStatus::kGranted);
    if (!region.is_refused && reply.nbytes != region.size) return false;
    region.range = reply.range;
    region.wants_words = !region.is_refused && reply.has_words == 1;
  }
  if (region.wants_words) {
    WordsPacket packet;
    UniqueFd fd;
    const Received received = receive_packet(connection, &packet, &fd);
    if (received != Received::kPacket) return received == Received::kNothing;
    if (packet.magic != kWordsMagic || packet.region != region.id || !fd) return false;
    std::string why;
    region.words = ReadOnlyMapping::map(fd.get(), packet.nbytes, &why);
    if (!region.words) return false;
  }
  *is_complete = true;
  return true;
}

std::shared_ptr<Batch> DeviceEndpoint::make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) {
  return std::make_shared<DeviceBatch>(std::static_pointer_cast<DeviceEndpoint>(shared_from_this()),
                                       std::static_pointer_cast<DeviceRegion>(std::move(remote)),
                                       std::move(reads));
}

// Whoever waits for the owner wakes. The owner is told nothing before the last mapping is gone.
void DeviceEndpoint::shutdown_sockets() {
  const auto connection = hold_ ? hold_->connection() : nullptr;
  if (connection) shutdown(connection->fd(), SHUT_RD);
}

void DeviceEndpoint::release() {
  home_.server->drop_grant(grant_);
  std::shared_ptr<Hold> hold;
  {
    const std::lock_guard lock(mutex_);
    hold.swap(hold_);
    connecting_.reset();
    to_ask_.clear();
    to_answer_.clear();
    for (const auto& known : regions_) {
      const auto region = known.lock();
      if (!region) continue;
      region->fd.reset();
      region->words.reset();
    }
  }
  if (hold) hold->let_go();
}

bool DeviceBatch::drive(const Deadline* deadline) {
  if (!is_ready_ && !await_region(deadline)) return false;
  while (next_ < spans_.size()) {
    if (is_aborted() || (deadline && deadline->passed()) || !copy_slice()) return false;
    if (!deadline && next_ < spans_.size()) return false;
  }
  return true;
}

// True once it is known what becomes of the batch: the region can be mapped, or the owner refused and all
// spans are settled.
bool DeviceBatch::await_region(const Deadline* deadline) {
  for (;;) {
    if (is_aborted()) return false;
    switch (endpoint_->poll(*remote_)) {
      case DeviceEndpoint::Progress::kLost:
        abort(Status::kPeerLost);
        return false;
      case DeviceEndpoint::Progress::kRefused:
        std::replace(statuses_.begin(), statuses_.end(), Status::kPending, Status::kRejected);
        next_ = spans_.size();
        [[fallthrough]];
      case DeviceEndpoint::Progress::kReady:
        slice_nbytes_ = kFirstSlice;
        is_ready_ = true;
        return true;
      case DeviceEndpoint::Progress::kWaiting:
        break;
    }
    if (!deadline || deadline->passed()) return false;
    endpoint_->wait_for_owner(*deadline);
  }
}

// Has the device copy a slice. False if that ended the batch: the local region was closed meanwhile, or the
// owner or the device is lost.
bool DeviceBatch::copy_slice() {
  const RegisteredRegion::Use use(*local_);
  if (!use) {
    abort(Status::kCanceled);
    return false;
  }
  const auto& device = device_memory_of(*local_)->device;
  // Held for the slice alone: the owner may be waiting to have it back.
  bool is_lost = false;
  const auto mapped = endpoint_->mapping(*remote_, device, &is_lost);
  if (is_lost) {
    abort(Status::kPeerLost);
    return false;
  }
  if (!mapped) return give_up();
  const auto copies = cut_parts(reinterpret_cast<uint64_t>(local_->base()), mapped->memory->address());
  const auto began = Clock::now();
  std::string why;
  const auto outcome = copies.empty() ? cuda::CopyOutcome::kDone : device->copy_within(copies, &why);
  if (outcome == cuda::CopyOutcome::kFailed) return give_up();
  if (outcome == cuda::CopyOutcome::kLost) {
    abort(Status::kPeerLost);
    return false;
  }
  uint64_t nbytes = 0;
  for (const cuda::InnerCopy& copy : copies) nbytes += copy.nbytes;
  learn(nbytes, Clock::now() - began);
  settle_parts();
  return true;
}

// The owner is there, and its memory is out of this device's reach: nobody is lost. True: all is settled.
bool DeviceBatch::give_up() {
  std::replace(statuses_.begin(), statuses_.end(), Status::kPending, Status::kOutOfRange);
  next_ = spans_.size();
  return true;
}

// The next parts of pending spans, about a slice of them.
std::vector<cuda::InnerCopy> DeviceBatch::cut_parts(uint64_t to, uint64_t from) {
  std::vector<cuda::InnerCopy> copies;
  parts_.clear();
  uint64_t left = slice_nbytes_;
  uint64_t offset = n_copied_;
  for (size_t i = next_; i < spans_.size() && left > 0 && parts_.size() < kSliceParts; ++i, offset = 0) {
    if (statuses_[i] != Status::kPending) continue;
    const Span& span = spans_[i];
    const uint64_t nbytes = std::min(left, static_cast<uint64_t>(span.length) - offset);
    copies.push_back({to + static_cast<uint64_t>(span.local) + offset,
                      from + static_cast<uint64_t>(span.remote) + offset, nbytes});
    parts_.push_back({i, offset + nbytes});
    left -= nbytes;
  }
  if (parts_.empty()) next_ = spans_.size();
  return copies;
}

// The copies are complete: only now may the words be asked whether the spans that end in them are good.
void DeviceBatch::settle_parts() {
  for (const Part& part : parts_) {
    next_ = part.span;
    n_copied_ = part.end;
    if (n_copied_ < static_cast<uint64_t>(spans_[next_].length)) continue;
    bool is_good = !is_validated(next_);
    if (!is_good && remote_->words) {
      const Word& word = words_[next_];
      is_good = word_lies_within(word.offset, remote_->words->nbytes()) &&
                load_word_after_bytes(remote_->words->base() + word.offset) == word.value;
    }
    statuses_[next_] = is_good ? Status::kOk : Status::kRejected;
    ++next_;
    n_copied_ = 0;
  }
}

void DeviceBatch::learn(uint64_t nbytes, std::chrono::duration<double> took) {
  if (nbytes < slice_nbytes_ / 2) return;  // what is small says nothing of speed
  if (took < kSliceTakes / 2) slice_nbytes_ = std::min(2 * slice_nbytes_, kLargestSlice);
  if (took > kSliceTakes * 2) slice_nbytes_ = std::max(slice_nbytes_ / 2, kFirstSlice);
}

}  // namespace p2pkv::cuda_ipc
