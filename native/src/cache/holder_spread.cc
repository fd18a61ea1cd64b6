#include "cache/holder_spread.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "directory/other_holders.h"

namespace p2pkv {
namespace {

// Has each bit of the result depend on each bit of the value (the finalizer of SplitMix64).
uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58'476d'1ce4'e5b9;
  value = (value ^ (value >> 27)) * 0x94d0'49bb'1331'11eb;
  return value ^ (value >> 31);
}

}  // namespace

size_t HolderSpread::number_of(const Location& location) const {
  const PeerId peer{location.owner, location.boot};
  const auto found =
      std::find_if(known_.begin(), known_.end(), [&](const Holder& holder) { return holder.peer == peer; });
  return static_cast<size_t>(found - known_.begin());
}

void HolderSpread::know(const std::vector<Location>& holders, uint64_t nbytes) {
  const size_t n_known = known_.size();
  std::vector<PeerId> peers;
  for (const Location& location : holders) {
    if (number_of(location) < known_.size()) continue;
    const uint64_t bits = mix(mix(draw_) ^ location.owner) >> 11;        // 53 of them
    const double uniform = (static_cast<double>(bits) + 0.5) * 0x1p-53;  // between 0 and 1, and neither
    known_.push_back({.peer = {location.owner, location.boot}, .wait = -std::log(uniform)});
    peers.push_back(known_.back().peer);
  }
  auto standings = look_(peers);
  for (size_t i = n_known; i < known_.size(); ++i) {
    known_[i].standing = std::move(standings[i - n_known]);
    const Pace* const pace = known_[i].standing.pace.get();
    if (pace == nullptr) continue;
    known_[i].usual = pace->usual(nbytes);
    known_[i].is_slow = pace->is_slow();
  }
}

size_t HolderSpread::choose(const Location* holders, size_t n) {
  std::array<Holder*, kMostHolders> all;
  int64_t fastest_ns = 0;
  for (size_t i = 0; i < n; ++i) {
    all[i] = &known_[number_of(holders[i])];
    const int64_t ns = all[i]->usual.most_ns;
    if (ns > 0 && (fastest_ns == 0 || ns < fastest_ns)) fastest_ns = ns;
  }
  const double alike_ns = kAlike * static_cast<double>(fastest_ns);
  size_t drawn = n, ready = n;
  double least = 0, least_ready = 0;
  for (size_t i = 0; i < n; ++i) {
    if (!all[i]->standing.is_reachable) continue;
    const auto ns = static_cast<double>(all[i]->usual.least_ns);  // no less than that for certain
    const double weight = ns > alike_ns ? std::max(alike_ns / ns, kLeastWeight) : 1.0;
    const double wait = all[i]->wait / weight;
    if (drawn == n || wait < least) {
      drawn = i;
      least = wait;
    }
    if (is_ready(*all[i]) && (ready == n || wait < least_ready)) {
      ready = i;
      least_ready = wait;
    }
  }
  if (ready == n) return 0;
  Holder& first = *all[drawn];
  first.is_to_connect = first.is_to_connect || !first.standing.is_connected;
  has_avoided_slow_ = has_avoided_slow_ || (first.is_slow && ready > 0);
  return ready;
}

std::vector<PeerId> HolderSpread::to_connect() const {
  std::vector<PeerId> peers;
  for (const Holder& holder : known_) {
    if (holder.is_to_connect && peers.size() < kMostToConnect) peers.push_back(holder.peer);
  }
  return peers;
}

}  // namespace p2pkv
