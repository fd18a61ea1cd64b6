#include "transports/cuda_ipc/reader.h"

#include <sys/socket.h>

#include <algorithm>
#include <mutex>
#include <utility>

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
// What can't be mapped is not tried again for so long; the driver may have been short of something.
constexpr std::chrono::seconds kUnmappable{1};

// What is to be copied next after `nbytes` of a slice that might have had as many as `planned`.
uint64_t next_slice(uint64_t planned, uint64_t nbytes, std::chrono::duration<double> took) {
  if (took > kSliceTakes * 2) return std::max(planned / 2, kFirstSlice);
  const bool is_too_small = nbytes >= planned / 2 && took < kSliceTakes / 2;
  return is_too_small ? std::min(2 * planned, kLargestSlice) : planned;
}

std::mutex noting;         // guards the next one
std::string last_refusal;  // of this process

void note_refusal(std::string why) {
  const std::lock_guard lock(noting);
  last_refusal = std::move(why);
}

}  // namespace

std::string refusal() {
  const std::lock_guard lock(noting);
  return last_refusal;
}

DeviceEndpoint::DeviceEndpoint(CudaIpcHome home)
    : RegionEndpoint(*home.server, {kHelloMagic, kRegionMagic, kRequestMagic}), home_(std::move(home)) {}

// The transport puts the host's half into it.
std::string DeviceEndpoint::make_half() {
  return to_blob(EndpointBlob{kEndpointMagic, kFrameVersion, 0, {}, own_door()});
}

bool DeviceEndpoint::take_half(std::string_view remote, std::string* error) {
  EndpointBlob owner;
  if (!from_blob(remote, kEndpointMagic, &owner, error)) return false;
  go_to(owner.door);
  return true;
}

std::shared_ptr<AskedRegion> DeviceEndpoint::make_region(uint32_t id, uint64_t nbytes) {
  return std::make_shared<DeviceRegion>(this, id, nbytes);
}

void DeviceEndpoint::keep(std::shared_ptr<OwnerSocket> connection) {
  hold_ = std::make_shared<Hold>(std::move(connection));
  home_.hang_ups->watch(hold_);
}

std::shared_ptr<OwnerSocket> DeviceEndpoint::connection() {
  return hold_ ? hold_->connection() : nullptr;
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
  *is_lost = !connection || connection->has_hung_up();
  if (*is_lost) return nullptr;
  if (auto mapped = hold->find(region.id, device->ordinal())) return mapped;
  std::string why;
  auto memory = cuda::MappedMemory::map(device, range, fd, region.size, &why);
  if (memory) {
    auto mapped = hold->keep(region.id, device->ordinal(), std::move(memory));
    *is_lost = !mapped;
    return mapped;
  }
  note_refusal(std::move(why));
  const std::lock_guard lock(mutex_);
  region.unmappable_until = Clock::now() + kUnmappable;
  return nullptr;
}

bool DeviceEndpoint::take_reply(AskedRegion& asked, int connection, bool* is_complete) {
  auto& region = static_cast<DeviceRegion&>(asked);
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
  if (const auto owner = connection()) shutdown(owner->fd(), SHUT_RD);
}

void DeviceEndpoint::release() {
  RegionEndpoint::release();
  std::shared_ptr<Hold> hold;
  {
    const std::lock_guard lock(mutex_);
    hold.swap(hold_);
  }
  if (hold) hold->let_go();
}

// A copy that was begun is waited for, whatever the deadline is.
bool DeviceBatch::copy_slice(const Deadline*) {
  const RegisteredRegion::Use use(*local_);
  if (!use) {
    abort(Status::kCanceled);
    return false;
  }
  const auto& device = device_memory_of(*local_)->device;
  bool is_lost = false;
  const auto mapped = endpoint_->mapping(*remote_, device, &is_lost);
  if (is_lost) {
    abort(Status::kPeerLost);
    return false;
  }
  if (!mapped) return give_up();
  const uint64_t planned = std::max(mapped->slice_nbytes.load(), kFirstSlice);
  const uint64_t nbytes = cut_parts(planned, UINT64_MAX);
  const auto copies = copies_of(reinterpret_cast<uint64_t>(local_->base()), mapped->memory->address());
  const auto began = Clock::now();
  std::string why;
  const auto outcome =
      copies.empty() ? cuda::CopyOutcome::kDone : device->copy_within(copies, mapped->memory->memory(), &why);
  if (outcome == cuda::CopyOutcome::kFailed) return give_up();
  if (outcome == cuda::CopyOutcome::kLost) {
    abort(Status::kPeerLost);
    return false;
  }
  mapped->slice_nbytes = next_slice(planned, nbytes, Clock::now() - began);
  settle_parts(parts().size());
  return true;
}

// The owner is there, and its memory is out of this device's reach: nobody is lost. True: all is settled.
bool DeviceBatch::give_up() {
  settle_rest(Status::kOutOfRange);
  return true;
}

std::vector<cuda::InnerCopy> DeviceBatch::copies_of(uint64_t to, uint64_t from) const {
  std::vector<cuda::InnerCopy> copies;
  copies.reserve(parts().size());
  for (const Part& part : parts()) {
    const Span& span = spans_[part.span];
    copies.push_back({to + static_cast<uint64_t>(span.local) + part.offset,
                      from + static_cast<uint64_t>(span.remote) + part.offset, part.nbytes});
  }
  return copies;
}

// Words lie in memory of their own, where there are any.
bool DeviceBatch::is_proven(size_t span) const {
  const Word& word = words_[span];
  return remote_->words && word_lies_within(word.offset, remote_->words->nbytes()) &&
         load_word_after_bytes(remote_->words->base() + word.offset) == word.value;
}

}  // namespace p2pkv::cuda_ipc
