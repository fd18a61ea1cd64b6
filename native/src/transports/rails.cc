#include "transports/rails.h"

#include <algorithm>
#include <cmath>

namespace p2pkv {
namespace {

// The weight of a new sample: some four batches make an estimate (as others have it; not tuned).
constexpr double kNews = 0.25;
// A smaller share is over before it shows any bandwidth.
constexpr uint64_t kLeastSample = 64 << 10;
// A silence may be so many times the longest one that was seen to end.
constexpr double kSilences = 2;
// What is left of the longest silence with each share that arrives: some twenty make it a tenth.
constexpr double kFading = 0.9;

Deadline::Clock::duration to_clock(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

}  // namespace

double Rails::completion(const Rail& rail, uint64_t nbytes, double unknown) const {
  return static_cast<double>(rail.in_flight + nbytes) / (rail.bandwidth > 0 ? rail.bandwidth : unknown);
}

// What a rail is taken for that has carried nothing yet; 1 if none has.
double Rails::best_bandwidth() const {
  double best = 0;
  for (size_t i = 0; i < n_; ++i) best = std::max(best, rails_[i].bandwidth);
  return best > 0 ? best : 1;
}

size_t Rails::least_known(const RailSet& usable) const {
  size_t found = n_;
  for (size_t i = 0; i < n_; ++i) {
    if (usable[i] && (found == n_ || rails_[i].last_sample < rails_[found].last_sample)) found = i;
  }
  return found;
}

std::vector<size_t> Rails::assign(const std::vector<uint64_t>& slices, const RailSet& usable) {
  const std::lock_guard lock(mutex_);
  const double unknown = best_bandwidth();
  std::vector<size_t> chosen;
  chosen.reserve(slices.size());
  for (const uint64_t nbytes : slices) {
    size_t best = n_;
    double soonest = 0;
    for (size_t i = 0; i < n_; ++i) {
      if (!usable[i]) continue;
      const double completion = this->completion(rails_[i], nbytes, unknown);
      if (best != n_ && completion >= soonest) continue;
      best = i;
      soonest = completion;
    }
    chosen.push_back(best);
    rails_[best].in_flight += nbytes;
  }
  if (++n_batches_ % kProbeEvery == 0 && !slices.empty()) {
    const size_t probed = least_known(usable);
    if (std::find(chosen.begin(), chosen.end(), probed) == chosen.end()) {
      rails_[chosen.back()].in_flight -= slices.back();
      rails_[probed].in_flight += slices.back();
      chosen.back() = probed;
    }
  }
  return chosen;
}

uint64_t Rails::n_bytes_in_flight(size_t rail) const {
  const std::lock_guard lock(mutex_);
  return rails_[rail].in_flight;
}

void Rails::sample(Rail& rail, double bytes_a_second) {
  rail.bandwidth =
      rail.bandwidth == 0 ? bytes_a_second : rail.bandwidth + kNews * (bytes_a_second - rail.bandwidth);
  rail.last_sample = n_batches_;
}

void Rails::arrived(size_t number, uint64_t nbytes, uint64_t load, double seconds) {
  const std::lock_guard lock(mutex_);
  Rail& rail = rails_[number];
  rail.in_flight -= std::min(rail.in_flight, nbytes);
  rail.longest_silence *= kFading;
  if (nbytes >= kLeastSample && seconds > 0) {
    sample(rail, static_cast<double>(std::max(nbytes, load)) / seconds);
  }
}

void Rails::gave_up(size_t number, uint64_t nbytes, uint64_t n_arrived, double seconds) {
  const std::lock_guard lock(mutex_);
  Rail& rail = rails_[number];
  rail.in_flight -= std::min(rail.in_flight, nbytes);
  if (n_arrived >= kLeastSample && seconds > 0) sample(rail, static_cast<double>(n_arrived) / seconds);
}

double Rails::bandwidth(size_t rail) const {
  const std::lock_guard lock(mutex_);
  return rails_[rail].bandwidth;
}

void Rails::heard_again(size_t rail, double silence) {
  const std::lock_guard lock(mutex_);
  rails_[rail].longest_silence = std::max(rails_[rail].longest_silence, silence);
}

double Rails::patience(size_t rail) const {
  const std::lock_guard lock(mutex_);
  return std::clamp(kSilences * rails_[rail].longest_silence, timing_.patience_least, timing_.patience_most);
}

void Rails::failed(size_t number, Time now) {
  const std::lock_guard lock(mutex_);
  Rail& rail = rails_[number];
  // Endpoints that are open at the same time find the same failure.
  if (rail.is_doubted && now < rail.retry_at) return;
  if (!rail.is_doubted && now - rail.proved_at > to_clock(timing_.forgiven_after)) rail.n_failures = 0;
  const double seconds = timing_.pause_first * std::exp2(std::min(rail.n_failures, 10u));
  ++rail.n_failures;
  rail.is_doubted = true;
  rail.retry_at = now + to_clock(std::min(timing_.pause_most, seconds));
}

void Rails::proved(size_t number, Time now) {
  const std::lock_guard lock(mutex_);
  Rail& rail = rails_[number];
  if (!rail.is_doubted || now < rail.retry_at) return;
  rail.is_doubted = false;
  rail.proved_at = now;
  // Well at the first look: maybe it had only been slow, and is given more time.
  if (rail.n_failures == 1) rail.longest_silence = std::max(rail.longest_silence, timing_.patience_least);
}

bool Rails::is_doubted(size_t rail) const {
  const std::lock_guard lock(mutex_);
  return rails_[rail].is_doubted;
}

Rails::Time Rails::retry_at(size_t rail) const {
  const std::lock_guard lock(mutex_);
  return rails_[rail].retry_at;
}

std::shared_ptr<PeerPorts> PeerPortsBook::find(const std::string& ports, size_t n_rails,
                                               size_t most_streams) {
  const std::lock_guard lock(mutex_);
  auto& known = known_[ports];
  if (!known || known->rails.n() != n_rails) known = std::make_shared<PeerPorts>(n_rails, most_streams);
  const auto found = known;
  // Which of the others go does not matter: what is known of a peer is learnt again in some batches.
  for (auto it = known_.begin(); known_.size() > kMost && it != known_.end();) {
    it = it->second.use_count() == 1 ? known_.erase(it) : std::next(it);
  }
  return found;
}

}  // namespace p2pkv
