// How a batch finds out that a lane is of no use any more although its device does not say so: it goes on
// asking for seconds before it does.
#include <algorithm>

#include "transports/verbs/batch.h"

namespace p2pkv::verbs {
namespace {

// Seconds that a lane may be silent which has never been heard. Within the default deadline of a call there
// is then time for another transport; and while others are heard, less.
constexpr double kNeverHeard = 0.4, kNeverHeardBesideOthers = 0.1;
// Likewise of one that was asked while it had nothing to read, while others are heard: the device has asked
// again by then, and been answered if there is a way.
constexpr double kGoneSeconds = 0.6;

}  // namespace

bool VerbsBatch::look_after(Time now) {
  if (now - looked_ < kLook) return true;
  looked_ = now;
  hear_proofs(now);
  for (size_t i = 0; i < lanes().size(); ++i) {
    if (tasks_[i].is_under_way) look_at(i, now);
  }
  if (!go_on()) return false;
  if (!is_hopeless(now)) return true;
  abort(Status::kPeerLost);
  return false;
}

// A peer that answered before may be slow: unless another rail is heard, that is for the deadline to end.
void VerbsBatch::look_at(size_t number, Time now) {
  const bool is_proven = lanes()[number].lane->is_proven();
  const double silence = this->silence(number, now), patience = rails().patience(number);
  if (!is_proven && silence > kNeverHeard) return lose(number, Fault::kSilent);
  if (lanes().size() == 1 || silence <= patience / 2) return;
  const double allowed = is_proven ? patience : std::max(patience, kNeverHeardBesideOthers);
  if (!is_contradicted(number, patience)) {
    ask_others(number);
  } else if (silence > allowed) {
    lose(number, Fault::kSilent);
  }
}

// Takes answers of lanes that were pinged.
void VerbsBatch::hear_proofs(Time now) {
  for (size_t i = 0; i < lanes().size(); ++i) {
    if (lanes()[i].lane->is_alive() && !tasks_[i].is_under_way) hear_proof(i, now);
  }
}

void VerbsBatch::hear_proof(size_t number, Time now) {
  auto& [lane, state, is_unproven] = lanes()[number];
  if (lane->listen() == Lane::Progress::kLost) return lose(number, Fault::kBroken);
  const double silence = lane->is_pinged() ? this->silence(number, now) : 0;
  if (state == State::kGood) {
    if (silence > kGoneSeconds && is_contradicted(number, kGoneSeconds)) lose(number, Fault::kSilent);
    return;
  }
  if (lane->is_pinged()) {
    if (silence > rails().patience(number)) rails().failed(number, now);
    return;
  }
  rails().proved(number, now);
  if (!rails().is_doubted(number)) state = State::kGood;
}

double VerbsBatch::silence(size_t number, Time now) const {
  return std::chrono::duration<double>(now - lanes()[number].lane->silent_since()).count();
}

// Whether another rail was heard when this lane had long been silent.
bool VerbsBatch::is_contradicted(size_t number, double patience) const {
  const auto well_after =
      lanes()[number].lane->silent_since() +
      std::chrono::duration_cast<Lane::Clock::duration>(std::chrono::duration<double>(patience / 2));
  for (size_t i = 0; i < lanes().size(); ++i) {
    const Lane& other = *lanes()[i].lane;
    if (i != number && other.is_alive() && other.heard_at() >= well_after) return true;
  }
  return false;
}

void VerbsBatch::ask_others(size_t number) {
  for (size_t i = 0; i < lanes().size(); ++i) {
    Lane& lane = *lanes()[i].lane;
    if (i == number || !lane.is_alive() || tasks_[i].is_under_way || lane.is_pinged()) continue;
    lane.ping();
    if (lane.listen() == Lane::Progress::kLost) lose(i, Fault::kBroken);
  }
}

// Whether all that is left has been silent for long, and a new endpoint would have more.
bool VerbsBatch::is_hopeless(Time now) const {
  bool has_lost = false;
  for (size_t i = 0; i < lanes().size(); ++i) {
    has_lost |= !lanes()[i].lane->is_alive();
    if (!lanes()[i].lane->is_alive()) continue;
    const bool is_waited_for = tasks_[i].is_under_way || lanes()[i].lane->is_pinged();
    const double long_silence = std::max(kHopelessSeconds, kHopelessPatiences * rails().patience(i));
    if (!is_waited_for || silence(i, now) < long_silence) return false;
  }
  return has_lost;
}

}  // namespace p2pkv::verbs
