#include "transports/shm/reader.h"

#include <sys/socket.h>

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
// Spans that are landed together make larger slices: a device is faster, and takes long to begin.
constexpr uint64_t kLandedSlice = 64 << 20;
constexpr uint64_t kLandedPoll = 16 << 20;
// Larger spans are copied in parts, which two threads can share.
constexpr uint64_t kPartBytes = 512 << 10;

}  // namespace

ShmEndpoint::ShmEndpoint(ShmHome home)
    : RegionEndpoint(*home.server, {kHelloMagic, kRegionMagic, kRequestMagic}), home_(std::move(home)) {}

std::string ShmEndpoint::make_half() {
  return to_blob(EndpointBlob{kEndpointMagic, kFrameVersion, 0, own_door()});
}

bool ShmEndpoint::take_half(std::string_view remote, std::string* error) {
  EndpointBlob owner;
  if (!from_blob(remote, kEndpointMagic, &owner, error)) return false;
  go_to(owner.door);
  return true;
}

std::shared_ptr<AskedRegion> ShmEndpoint::make_region(uint32_t id, uint64_t nbytes) {
  return std::make_shared<ShmRemoteRegion>(this, id, nbytes);
}

std::shared_ptr<Transfer> ShmEndpoint::lend(std::shared_ptr<MemoryRegion> local,
                                            std::shared_ptr<RemoteRegion> remote, std::vector<Span> spans,
                                            std::vector<Word> words, Takes takes) {
  return post(std::move(local), std::move(remote),
              {nullptr, std::move(spans), std::move(words), {}, std::move(takes)});
}

bool ShmEndpoint::maps(const RemoteRegion& remote) {
  const auto* region = dynamic_cast<const ShmRemoteRegion*>(&remote);
  return region != nullptr && mapping(*region) != nullptr;
}

std::shared_ptr<ReadOnlyMapping> ShmEndpoint::mapping(const ShmRemoteRegion& region) {
  const std::lock_guard lock(mutex_);
  return region.mapping;
}

bool ShmEndpoint::take_reply(AskedRegion& asked, int connection, bool* is_complete) {
  auto& region = static_cast<ShmRemoteRegion&>(asked);
  MapReply reply;
  UniqueFd fd;
  const Received received = receive_packet(connection, &reply, &fd);
  if (received != Received::kPacket) return received == Received::kNothing;
  if (reply.magic != kReplyMagic || reply.region != region.id) return false;
  region.is_refused = reply.status != static_cast<uint32_t>(MapStatus::kGranted);
  if (!region.is_refused) {
    // That it can't be mapped says nothing of the pages: this process may have no descriptor or address
    // space left. So the owner counts as lost; that its region is gone only the owner can say.
    if (!fd || reply.nbytes != region.size) return false;
    std::string why;
    region.mapping = home_.mappings->get(owner_name(), region.id, fd.get(), region.size, &why);
    if (!region.mapping) return false;
  }
  *is_complete = true;
  return true;
}

std::shared_ptr<Batch> ShmEndpoint::make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) {
  return std::make_shared<ShmBatch>(std::static_pointer_cast<ShmEndpoint>(shared_from_this()),
                                    std::static_pointer_cast<ShmRemoteRegion>(std::move(remote)),
                                    std::move(reads));
}

void ShmEndpoint::shutdown_sockets() {
  if (connection_) shutdown(connection_->fd(), SHUT_RDWR);
}

void ShmEndpoint::release() {
  RegionEndpoint::release();
  const std::lock_guard lock(mutex_);
  connection_.reset();
}

bool ShmBatch::begin() {
  mapping_ = endpoint_->mapping(*remote_);
  return mapping_ != nullptr;
}

// Copies less than a slice if the deadline comes or the batch is aborted.
bool ShmBatch::copy_slice(const Deadline* deadline) {
  const RegisteredRegion::Use use(*local_);
  if (!use) {
    abort(Status::kCanceled);
    return false;
  }
  if (takes_.land) {
    cut_parts(deadline ? kLandedSlice : kLandedPoll, kPartBytes);
    land_parts();
    return true;
  }
  const uint64_t n_cut = cut_parts(deadline ? kSliceBytes : kPollBytes, kPartBytes);
  const size_t n_made = make_copies({parts().size(), n_cut, [this](size_t i) { copy_part(parts()[i]); }},
                                    [&] { return is_aborted() || (deadline && deadline->passed()); });
  settle_parts(n_made);
  if (is_complete()) mapping_.reset();  // a settled transfer must not keep that of a closed endpoint
  return true;
}

// Noting a span takes no time worth a second thread, nor is it to be measured as if bytes had been copied.
void ShmBatch::land_parts() {
  for (const Part& part : parts()) copy_part(part);
  takes_.land({mapping_->base(), mapping_->nbytes(), true, mapping_->kept()});
  settle_parts(parts().size());
  if (is_complete()) mapping_.reset();
}

void ShmBatch::copy_part(const Part& part) {
  const Span& span = spans_[part.span];
  if (takes_.is_taken(part.span)) return takes_.take(takes_.tags[part.span], mapping_->base() + span.remote);
  copy_bytes(local_->base() + span.local + part.offset, mapping_->base() + span.remote + part.offset,
             part.nbytes);
}

bool ShmBatch::is_proven(size_t span) const {
  return load_word_after_bytes(mapping_->base() + words_[span].offset) == words_[span].value;
}

}  // namespace p2pkv::shm
