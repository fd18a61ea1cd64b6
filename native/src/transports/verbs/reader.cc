#include "transports/verbs/reader.h"

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <fstream>

namespace p2pkv::verbs {
namespace {

// Below this a second lane's completions cost more than its bandwidth brings (a guess from wake-ups of 5 us
// at 25 GB/s).
constexpr uint64_t kSpreadFromBytes = 256 << 10;
// A wake-up by interrupt costs some 5 us; what comes sooner is waited for.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kStallLookMs = 50;
// Connecting takes the device about a millisecond; what takes longer goes on beside the first batch.
constexpr double kConnectS = 0.02;
constexpr int kStepsPerPoll = 8;
// Until a way that failed is tried again, and a connection with fewer lanes than it could have is replaced.
constexpr auto kRetryRail = std::chrono::seconds(30);

uint32_t random_nonce() {
  uint32_t nonce;
  fill_random(&nonce, sizeof nonce);
  return nonce & 0xffffff;
}

Gid gid_of(const LaneBlob& lane) {
  Gid gid;
  std::copy(std::begin(lane.gid), std::end(lane.gid), gid.begin());
  return gid;
}

int own_numa_node() {
  unsigned cpu = 0, node = 0;
  return getcpu(&cpu, &node) == 0 ? static_cast<int>(node) : -1;
}

}  // namespace

void FailedWays::add(const Way& way) {
  const std::lock_guard lock(mutex_);
  until_[way] = std::chrono::steady_clock::now() + kRetryRail;
}

bool FailedWays::contains(const Way& way) {
  const std::lock_guard lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  std::erase_if(until_, [&](const auto& entry) { return entry.second <= now; });
  return until_.contains(way);
}

uint32_t first_packet(uint32_t our_nonce, uint32_t their_nonce) {
  return (our_nonce ^ their_nonce) & 0xffffff;
}

bool parse_endpoint(std::string_view text, EndpointBlob* blob, std::vector<LaneBlob>* lanes,
                    std::string* error) {
  if (!from_blob(text, kEndpointMagic, blob, error)) return false;
  const bool is_sane = blob->n_lanes >= 1 && blob->n_lanes <= kMaxRails &&
                       text.size() == sizeof *blob + blob->n_lanes * sizeof(LaneBlob);
  lanes->resize(is_sane ? blob->n_lanes : 0);
  for (size_t i = 0; i < lanes->size(); ++i) {
    LaneBlob& lane = (*lanes)[i];
    std::memcpy(&lane, text.data() + sizeof *blob + i * sizeof lane, sizeof lane);
    const bool is_lane_sane = lane.queue_pair == 0 ||  // one that can't be used
                              (lane.rail < kMaxRails && lane.mtu >= IBV_MTU_256 && lane.mtu <= IBV_MTU_4096);
    if (!is_lane_sane) lanes->clear();
  }
  if (lanes->empty()) *error = "handshake is malformed";
  return !lanes->empty();
}

VerbsEndpoint::VerbsEndpoint(VerbsHome home) : home_(std::move(home)), nonce_(random_nonce()) {}

bool VerbsEndpoint::make_lanes() {
  if (home_.rails.empty()) failure_ = "the transport is closed";
  for (size_t i = 0; i < home_.rails.size(); ++i) {
    auto lane = Lane::create(home_.rails[i], static_cast<uint8_t>(i), &failure_);
    if (lane) lanes_.push_back({std::move(lane), {}});
  }
  return !lanes_.empty();
}

// Says who this end is while its lanes still are in the order in which the peer connects to them.
std::string VerbsEndpoint::make_half() {
  if (!make_lanes()) return {};
  EndpointBlob blob{};
  blob.magic = kEndpointMagic;
  blob.version = kFrameVersion;
  blob.n_lanes = static_cast<uint8_t>(lanes_.size());
  blob.n_rails = static_cast<uint8_t>(home_.rails.size());
  blob.nonce = nonce_;
  std::string half = to_blob(blob);
  for (const Connected& connected : lanes_) half += to_blob(connected.lane->describe());
  return half;
}

bool VerbsEndpoint::take_half(std::string_view remote, std::string* error) {
  EndpointBlob blob;
  std::vector<LaneBlob> peer;
  if (!parse_endpoint(remote, &blob, &peer, error)) return false;
  if (lanes_.empty()) {
    *error = failure_;
    return false;
  }
  connect_lanes(peer, first_packet(nonce_, blob.nonce));
  if (lanes_.size() < std::min<size_t>(home_.rails.size(), blob.n_rails)) {
    retire_at_ = Clock::now() + kRetryRail;
  }
  return true;
}

// What can't be connected is left out; if that is all, reads find the peer lost.
void VerbsEndpoint::connect_lanes(const std::vector<LaneBlob>& peer, uint32_t packet) {
  std::vector<Connected> connected;
  for (size_t i = 0; i < std::min(lanes_.size(), peer.size()); ++i) {
    Connected& lane = lanes_[i];
    lane.way = {gid_of(lane.lane->describe()), gid_of(peer[i])};
    if (peer[i].queue_pair == 0 || home_.failed_ways->contains(lane.way)) continue;
    lane.lane->connect(peer[i], packet, *home_.connector);
    connected.push_back(std::move(lane));
  }
  for (const Connected& lane : connected) is_known(lane.lane->outcome(), kConnectS);
  lanes_ = std::move(connected);
  const int here = own_numa_node();
  std::stable_partition(lanes_.begin(), lanes_.end(),
                        [&](const Connected& lane) { return lane.lane->numa_node() == here; });
}

std::shared_ptr<RemoteRegion> VerbsEndpoint::attach(std::string_view region, std::string* error) {
  RegionBlob blob;
  RegionKeys keys;
  if (!from_blob(region, kRegionMagic, &blob, error)) return nullptr;
  if (region.size() == sizeof blob + sizeof keys) {
    std::memcpy(&keys, region.data() + sizeof blob, sizeof keys);
    if (keys.n_rails >= 1 && keys.n_rails <= kMaxRails) {
      return std::make_shared<VerbsRemoteRegion>(this, blob, keys);
    }
  }
  *error = "description of a region is malformed";
  return nullptr;
}

std::shared_ptr<Batch> VerbsEndpoint::make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) {
  return std::make_shared<VerbsBatch>(std::static_pointer_cast<VerbsEndpoint>(shared_from_this()),
                                      std::static_pointer_cast<VerbsRemoteRegion>(std::move(remote)),
                                      std::move(reads));
}

std::string VerbsEndpoint::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void VerbsEndpoint::release() {
  for (Connected& connected : lanes_) connected.lane->say_good_bye();
  const std::lock_guard lock(mutex_);
  lanes_.clear();
  home_.rails.clear();
  home_.connector.reset();
  interrupted_.close();
}

VerbsBatch::VerbsBatch(std::shared_ptr<VerbsEndpoint> endpoint, std::shared_ptr<VerbsRemoteRegion> remote,
                       Reads reads)
    : Batch(std::move(reads)), endpoint_(std::move(endpoint)), remote_(std::move(remote)) {}

std::vector<Lane*> VerbsBatch::alive() const {
  std::vector<Lane*> lanes;
  for (const auto& connected : endpoint_->lanes_) {
    if (connected.lane->is_alive()) lanes.push_back(connected.lane.get());
  }
  return lanes;
}

void VerbsBatch::start() {
  endpoint_->interrupted_.clear();
  if (VerbsEndpoint::Clock::now() >= endpoint_->retire_at_) return;  // drive() finds nothing begun
  use_.emplace(*local_);
  if (!*use_) return;
  const auto lanes = alive();
  if (lanes.empty()) return;
  const bool is_large = n_pending_bytes(spans_, statuses_) >= kSpreadFromBytes;
  const auto shares = split_spans(spans_, words_, statuses_, is_large ? lanes.size() : 1);
  for (size_t i = 0; i < shares.size(); ++i) {
    lanes[i]->begin(memory(), shares[i]);
    lanes[i]->post_first();
  }
}

BatchMemory VerbsBatch::memory() {
  return {spans_, words_, statuses_, *static_cast<const Registration*>(local_->registration()),
          remote_->keys};
}

bool VerbsBatch::drive(const Deadline* deadline) {
  auto spin_until = Lane::Clock::now() + kSpin;
  for (int n_steps = 0;; ++n_steps) {
    if (is_aborted()) return false;
    Step now = step();
    if (now == Step::kBlocked && deadline && Lane::Clock::now() >= spin_until) {
      if (!drop_stalled()) return false;
      now = sleep(*deadline);
    }
    if (now == Step::kDone) return true;
    if (now == Step::kEnded) return false;
    if (now == Step::kMoved) spin_until = Lane::Clock::now() + kSpin;
    if (deadline ? deadline->passed() : now == Step::kBlocked || n_steps == kStepsPerPoll) return false;
  }
}

VerbsBatch::Step VerbsBatch::step() {
  if (!use_ || !*use_ || alive().empty()) {
    abort(use_ && !*use_ ? Status::kCanceled : Status::kPeerLost);
    return Step::kEnded;
  }
  bool has_moved = false, is_done = true;
  for (size_t i = 0; i < endpoint_->lanes_.size(); ++i) {
    Lane& lane = *endpoint_->lanes_[i].lane;
    if (!lane.has_work()) continue;
    const Lane::Progress progress = lane.advance();
    if (progress == Lane::Progress::kDone) continue;
    is_done = false;
    has_moved |= progress != Lane::Progress::kBlocked;
    if (progress == Lane::Progress::kLost && !hand_over(i)) return Step::kEnded;
    if (progress == Lane::Progress::kLocalClosed) {
      abort(Status::kCanceled);
      return Step::kEnded;
    }
    if (progress == Lane::Progress::kRefused) {
      reject();
      return Step::kDone;
    }
  }
  if (is_done) let_go();
  return is_done ? Step::kDone : (has_moved ? Step::kMoved : Step::kBlocked);
}

// Lets another lane do what this one, which failed, has not done. False, and the batch aborted, if there is
// none.
bool VerbsBatch::hand_over(size_t failed) {
  Lane& lane = *endpoint_->lanes_[failed].lane;
  const auto spans = lane.unsettled();
  lane.destroy();
  lane.finish();
  endpoint_->retire_at_ = {};  // good for this batch, then replaced
  const auto others = alive();
  if (others.empty()) {
    abort(Status::kPeerLost);
    return false;
  }
  others.front()->begin(memory(), spans);
  return true;
}

// Gives up on lanes from which nothing comes, if another will do or it never was any good. A peer that
// answered before may be slow: that is for the deadline to end.
bool VerbsBatch::drop_stalled() {
  const auto now = Lane::Clock::now();
  for (size_t i = 0; i < endpoint_->lanes_.size(); ++i) {
    const auto& [lane, way] = endpoint_->lanes_[i];
    if (!lane->is_alive() || !lane->is_stalled(now)) continue;
    const bool has_other = alive().size() > 1;
    if (!has_other && lane->is_proven()) continue;
    if (has_other) endpoint_->home_.failed_ways->add(way);
    if (!hand_over(i)) return false;
  }
  return true;
}

// The peer has closed the region: nothing of it may count any more.
void VerbsBatch::reject() {
  quiesce();
  std::replace(statuses_.begin(), statuses_.end(), Status::kPending, Status::kRejected);
  endpoint_->sever();
}

VerbsBatch::Step VerbsBatch::sleep(const Deadline& deadline) {
  pollfd fds[kMaxRails + 1];
  nfds_t n = 0;
  fds[n++] = {endpoint_->interrupted_.fd(), POLLIN, 0};
  for (Lane* lane : alive()) {
    lane->drain();
    lane->arm();
    fds[n++] = {lane->fd(), POLLIN, 0};
  }
  const Step now = step();  // what came before arm() is not told of
  if (now == Step::kBlocked && !is_aborted()) poll(fds, n, std::min(kStallLookMs, deadline.poll_ms()));
  return now;
}

// Local memory is not the devices' any more: all has arrived, or the queue pairs are gone.
void VerbsBatch::let_go() {
  for (const auto& connected : endpoint_->lanes_) connected.lane->finish();
  use_.reset();
}

void VerbsBatch::quiesce() {
  for (const auto& connected : endpoint_->lanes_) connected.lane->destroy();
  let_go();
}

}  // namespace p2pkv::verbs
