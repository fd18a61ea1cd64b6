// How a batch finds out that a stream is of no use any more although nobody says so: a rail that was cut
// loses packets without a word.
//
// Silence alone proves nothing, for an owner may be busy, or stopped. So a stream loses its share only if
// another rail was heard well after this one fell silent; where nobody there has anything to say, an empty
// request asks for an answer. Even so it may only have been slow: it is kept, and is good again when it has
// answered. One that has not after a while is lost.
#include <algorithm>

#include "transports/tcp/batch.h"

namespace p2pkv::tcp {
namespace {

// A stream is late that has had twice the time that was predicted, and this, if another rail would bring what
// it has not in a quarter of the time, and more than this sooner.
constexpr double kPredictedTimes = 2, kLateTimes = 4, kLateSeconds = 0.010;
// Since something was asked for, while other rails were heard: TCP has asked again by then, and been
// answered if there is a way.
constexpr double kGoneSeconds = 0.5;

int64_t to_ns(Deadline::Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

bool TcpBatch::look_after(Time now) {
  if (rails().n() == 1 || now - looked_ < kLook) return true;
  looked_ = now;
  hear_proofs(now);
  for (size_t i = 0; i < tasks_.size(); ++i) {
    if (tasks_[i].is_under_way && !tasks_[i].called_off) look_at(i, now);
  }
  if (!is_hopeless(now)) return true;
  give_up(Status::kPeerLost);
  return false;
}

void TcpBatch::look_at(size_t number, Time now) {
  const Strand& strand = *strands()[number];
  const double patience = rails().patience(strand.rail), silence = this->silence(number, now);
  if (silence > patience / 2) {
    if (!is_contradicted(number, patience)) {
      ask_others(strand.rail);
    } else if (silence > patience) {
      take_back(number, Fault::kSilent);
    }
  } else if (is_late(number, now)) {
    take_back(number, Fault::kLate);
  }
}

// Seconds since something came or was asked for; 0 if something has come that its thread has not taken yet.
double TcpBatch::silence(size_t number, Time now) const {
  const Stream& stream = strands()[number]->stream;
  const int64_t since = std::max(stream.heard_ns(), stream.asked_ns());
  return stream.has_news() ? 0 : static_cast<double>(to_ns(now) - since) / 1e9;
}

// Whether another rail was heard when this stream had long been silent.
bool TcpBatch::is_contradicted(size_t number, double patience) const {
  const Strand& silent = *strands()[number];
  const int64_t since = std::max(silent.stream.heard_ns(), silent.stream.asked_ns());
  const auto well_after = since + static_cast<int64_t>(patience / 2 * 1e9);
  return std::any_of(strands().begin(), strands().end(), [&](const auto& other) {
    return other->rail != silent.rail && other->state != Strand::State::kDead &&
           other->stream.heard_ns() >= well_after;
  });
}

// Whether a stream that owes an answer, and may have been sound, will never give it.
bool TcpBatch::is_gone(size_t number, Time now) const {
  return strands()[number]->state != Strand::State::kProving && silence(number, now) > kGoneSeconds &&
         is_contradicted(number, kGoneSeconds);
}

void TcpBatch::ping(size_t number) {
  Strand& strand = *strands()[number];
  if (std::exchange(strand.is_pinged, true)) return;
  strand.stream.ping();
}

void TcpBatch::ask_others(size_t rail) {
  for (size_t i = 0; i < tasks_.size(); ++i) {
    const Strand& strand = *strands()[i];
    const bool is_idle = strand.state != Strand::State::kDead && !tasks_[i].is_under_way;
    if (strand.rail != rail && is_idle) ping(i);
  }
}

// A rail that others share, or that has become slow, holds up a batch for which the rest have nothing to do.
bool TcpBatch::is_late(size_t number, Time now) const {
  const Strand& strand = *strands()[number];
  const Task& task = tasks_[number];
  double best = 0;  // of the other rails, if all of them are idle
  for (size_t i = 0; i < tasks_.size(); ++i) {
    const Strand& other = *strands()[i];
    if (other.rail == strand.rail || other.state != Strand::State::kGood) continue;
    if (tasks_[i].is_under_way) return false;
    best = std::max(best, rails().bandwidth(other.rail));
  }
  const auto n_arrived = static_cast<double>(strand.stream.n_bytes());
  const double bandwidth = rails().bandwidth(strand.rail);
  if (best == 0 || bandwidth == 0 || n_arrived == 0) return false;
  const double elapsed = std::chrono::duration<double>(now - task.began).count();
  const double left = static_cast<double>(task.nbytes) - n_arrived;
  const double predicted = static_cast<double>(task.load) / bandwidth;
  return elapsed > kPredictedTimes * predicted + kLateSeconds &&
         left / n_arrived * elapsed > kLateTimes * left / best + kLateSeconds;
}

// Whether all that is left has been silent for long, and a new endpoint would have more. A stream that is
// idle says nothing of its rail where another one there is waited for.
bool TcpBatch::is_hopeless(Time now) const {
  const auto is_waited_for = [&](size_t i) { return tasks_[i].is_under_way || strands()[i]->is_pinged; };
  std::vector<bool> is_asked(rails().n()), has_living(rails().n());
  bool has_lost = false;
  for (size_t i = 0; i < tasks_.size(); ++i) {
    const Strand& strand = *strands()[i];
    // One that is still proving itself a new endpoint would not have either.
    has_lost |= strand.state == Strand::State::kDead || strand.state == Strand::State::kSuspected;
    if (strand.state == Strand::State::kDead) continue;
    has_living[strand.rail] = true;
    if (!is_waited_for(i)) continue;
    is_asked[strand.rail] = true;
    const double long_silence =
        std::max(kHopelessSeconds, kHopelessPatiences * rails().patience(strand.rail));
    if (silence(i, now) < long_silence) return false;
  }
  return has_lost && is_asked == has_living;
}

// Takes the share from a stream, once its thread has left it.
void TcpBatch::take_back(size_t number, Fault fault) {
  if (number == own_) {
    own_ = kNobody;
    abandon(number, fault);
    return;
  }
  tasks_[number].called_off = fault;
  strands()[number]->helper->call_off();
}

}  // namespace p2pkv::tcp
