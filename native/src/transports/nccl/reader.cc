#include "transports/nccl/reader.h"

#include <utility>

namespace p2pkv::nccl {

std::shared_ptr<Line> LineBook::attach(Means* means, const EndpointBlob& owner, std::string* error) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    *error = "the transport is closed";
    return nullptr;
  }
  for (auto each = lines_.begin(); each != lines_.end();) {
    const auto line = each++;
    if (line->first == owner.instance || !line->second->is_over()) continue;
    lines_.erase(line);
  }
  std::erase_if(leaving_, [](const auto& line) { return line->is_over(); });
  const auto known = lines_.find(owner.instance);
  if (known != lines_.end()) {
    if (known->second->attach()) return known->second;
    // Nobody here waits for NCCL to let go of it.
    leaving_.push_back(std::move(known->second));
    lines_.erase(known);
  }
  auto line = Line::open(means, to_blob(owner.door), error);
  if (!line) return nullptr;
  line->attach();
  lines_[owner.instance] = line;
  return line;
}

void LineBook::close() {
  std::vector<std::shared_ptr<Line>> lines;
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    lines.swap(leaving_);
    for (auto& [instance, line] : lines_) lines.push_back(std::move(line));
    lines_.clear();
  }
  for (const auto& line : lines) line->close();
}

std::shared_ptr<RemoteRegion> NcclEndpoint::attach(std::string_view region, std::string* error) {
  RegionBlob blob;
  if (!from_blob(region, kRegionMagic, &blob, error)) return nullptr;
  return std::make_shared<AttachedRegion>(this, blob.region, blob.nbytes);
}

bool NcclEndpoint::take_half(std::string_view remote, std::string* error) {
  EndpointBlob owner;
  if (!from_blob(remote, kEndpointMagic, &owner, error)) return false;
  line_ = home_.lines->attach(home_.means, owner, error);
  return line_ != nullptr;
}

std::shared_ptr<Batch> NcclEndpoint::make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) {
  return std::make_shared<NcclBatch>(std::static_pointer_cast<NcclEndpoint>(shared_from_this()), remote->id,
                                     std::move(reads));
}

void NcclEndpoint::release() {
  const std::shared_ptr<Line> line = std::exchange(line_, nullptr);
  if (line) line->detach();
}

NcclBatch::NcclBatch(std::shared_ptr<NcclEndpoint> endpoint, uint32_t remote, Reads reads)
    : Batch(std::move(reads)),
      endpoint_(std::move(endpoint)),
      line_(endpoint_->line_),
      intake_(std::make_shared<Intake>(Wanted{local_, remote, spans_, words_, statuses_})) {}

bool NcclBatch::drive(const Deadline* deadline) {
  switch (intake_->wait(deadline)) {
    case Intake::State::kComplete:
      statuses_ = intake_->statuses();
      return !is_aborted();
    case Intake::State::kLost:
      abort(Status::kPeerLost);
      return false;
    case Intake::State::kLocalClosed:
      abort(Status::kCanceled);
      return false;
    case Intake::State::kPending:
      return false;
  }
  return false;
}

void NcclBatch::interrupt() {
  intake_->wake();
  endpoint_->sever();
}

// What has landed until now counts; what the line still brings is dropped there.
void NcclBatch::quiesce() {
  intake_->close();
  statuses_ = intake_->statuses();
  line_->wake();
}

}  // namespace p2pkv::nccl
