#include "transports/verbs/reader.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "transports/verbs/batch.h"

namespace p2pkv::verbs {
namespace {

// Connecting takes the device about a millisecond; what takes longer goes on beside the first batch.
constexpr double kConnectS = 0.02;
// Until a connection with fewer lanes than it could have is replaced.
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
    auto lane = Lane::create(home_.rails[i], static_cast<uint8_t>(i), home_.reaches_devices, &failure_);
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
  home_.counters->have(home_.rails.size());
  if (lanes_.size() < std::min<size_t>(home_.rails.size(), blob.n_rails)) {
    retire_at_ = Clock::now() + kRetryRail;
  }
  return true;
}

// What can't be connected is left out; if that is all, reads find the peer lost.
void VerbsEndpoint::connect_lanes(const std::vector<LaneBlob>& peer, uint32_t packet) {
  const int here = own_numa_node();
  std::vector<Connected> near, far;
  std::string near_ports, far_ports;
  for (size_t i = 0; i < std::min(lanes_.size(), peer.size()); ++i) {
    Connected& lane = lanes_[i];
    if (peer[i].queue_pair == 0) continue;
    const Gid ends[] = {gid_of(lane.lane->describe()), gid_of(peer[i])};
    lane.lane->connect(peer[i], packet, *home_.connector);
    const bool is_near = lane.lane->numa_node() == here;
    for (const Gid& end : ends) (is_near ? near_ports : far_ports).append(end.begin(), end.end());
    (is_near ? near : far).push_back(std::move(lane));
  }
  std::move(far.begin(), far.end(), std::back_inserter(near));
  lanes_ = std::move(near);
  prove_doubted(near_ports + far_ports);
  for (const Connected& lane : lanes_) {
    if (!lane.is_unproven) is_known(lane.lane->outcome(), kConnectS);
  }
}

// What is known of the peer's ports holds for each order of them apart.
void VerbsEndpoint::prove_doubted(const std::string& ports) {
  ports_ = home_.book->find(ports, lanes_.size(), 1);
  const auto& rails = ports_->rails;
  bool has_sound = false;
  for (size_t i = 0; i < lanes_.size(); ++i) has_sound |= !rails.is_doubted(i);
  for (size_t i = 0; has_sound && i < lanes_.size(); ++i) {
    if (!rails.is_doubted(i)) continue;
    lanes_[i].state = Connected::State::kProving;
    lanes_[i].is_unproven = true;
    lanes_[i].lane->ping();
  }
}

bool VerbsEndpoint::is_worn() {
  const std::lock_guard lock(mutex_);
  if (!ports_) return false;
  const auto now = Clock::now();
  if (now >= retire_at_) return true;
  for (size_t i = 0; lanes_.size() > 1 && i < lanes_.size(); ++i) {
    const bool is_good = lanes_[i].lane->is_alive() && lanes_[i].state == Connected::State::kGood;
    if (!is_good && (!lanes_[i].is_unproven || now >= ports_->rails.retry_at(i))) return true;
  }
  return false;
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

}  // namespace p2pkv::verbs
