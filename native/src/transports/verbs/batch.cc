#include "transports/verbs/batch.h"

#include <poll.h>

#include <algorithm>
#include <utility>

namespace p2pkv::verbs {
namespace {

// Below this a second lane's completions cost more than its bandwidth brings (a guess from wake-ups of 5 us
// at 25 GB/s).
constexpr uint64_t kSpreadFromBytes = 256 << 10;
// A wake-up by interrupt costs some 5 us; what comes sooner is waited for.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kLookAlone = std::chrono::milliseconds(50);
constexpr int kStepsPerPoll = 8;
// Seconds; poll(2) counts in milliseconds.
constexpr double kLate = 0.002;

double seconds_between(Lane::Clock::time_point from, Lane::Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

VerbsBatch::VerbsBatch(std::shared_ptr<VerbsEndpoint> endpoint, std::shared_ptr<VerbsRemoteRegion> remote,
                       Reads reads)
    : Batch(std::move(reads)),
      endpoint_(std::move(endpoint)),
      remote_(std::move(remote)),
      tasks_(endpoint_->lanes_.size()) {}

RailCounters::Rail& VerbsBatch::counters(size_t lane) const {
  return endpoint_->home_.counters->rails[lanes()[lane].lane->rail_number()];
}

void VerbsBatch::start() {
  endpoint_->interrupted_.clear();
  use_.emplace(*local_);
  if (!*use_) return;  // drive() finds nothing begun
  looked_ = Lane::Clock::now();
  hear_proofs(looked_);
  auto spans = pending_spans(statuses_);
  if (!hand_out(spans)) orphans_ = std::move(spans);
}

BatchMemory VerbsBatch::memory() {
  return {spans_, words_, statuses_, *static_cast<const Registration*>(local_->registration()),
          remote_->keys};
}

// Gives the spans to lanes that are good, behind what they have; false if there is none.
bool VerbsBatch::hand_out(const std::vector<uint32_t>& spans) {
  RailSet usable{};
  size_t n_usable = 0;
  for (size_t i = 0; i < lanes().size(); ++i) {
    usable[i] =
        lanes()[i].lane->is_alive() && lanes()[i].state == State::kGood && !lanes()[i].lane->is_pinged();
    n_usable += usable[i];
  }
  if (n_usable == 0) return false;
  uint64_t n_bytes = 0;
  for (const uint32_t span : spans) n_bytes += static_cast<uint64_t>(spans_[span].length);
  const bool is_spread = n_bytes >= kSpreadFromBytes && n_usable > 1;
  const auto shares = share_by_rail(rails(), usable, spans_, words_, spans, is_spread);
  for (size_t i = 0; i < lanes().size(); ++i) {
    if (!shares[i].empty()) begin(i, shares[i]);
  }
  return true;
}

void VerbsBatch::begin(size_t number, const std::vector<uint32_t>& share) {
  Task& task = tasks_[number];
  Lane& lane = *lanes()[number].lane;
  if (!task.is_under_way) {
    task = {true, 0, 0, Lane::Clock::now()};
    lane.take_longest_silence();
  }
  for (const uint32_t span : share) task.nbytes += static_cast<uint64_t>(spans_[span].length);
  task.load = rails().n_bytes_in_flight(number);
  lane.begin(memory(), share);
  lane.post_first();
}

bool VerbsBatch::drive(const Deadline* deadline) {
  auto spin_until = Lane::Clock::now() + kSpin;
  for (int n_steps = 0;; ++n_steps) {
    if (is_aborted()) return false;
    Step now = step();
    if (now != Step::kDone && now != Step::kEnded && !look_after(Lane::Clock::now())) return false;
    if (now == Step::kBlocked && deadline && Lane::Clock::now() >= spin_until) now = sleep(*deadline);
    if (now == Step::kDone) return true;
    if (now == Step::kEnded) return false;
    if (now == Step::kMoved) spin_until = Lane::Clock::now() + kSpin;
    if (deadline ? deadline->passed() : now == Step::kBlocked || n_steps == kStepsPerPoll) return false;
  }
}

VerbsBatch::Step VerbsBatch::step() {
  if (!use_ || !*use_) {
    abort(Status::kCanceled);
    return Step::kEnded;
  }
  bool has_moved = false;
  for (size_t i = 0; i < lanes().size(); ++i) {
    if (!tasks_[i].is_under_way) continue;
    if (!advance(i, &has_moved)) return is_aborted() ? Step::kEnded : Step::kDone;
  }
  if (!go_on()) return Step::kEnded;
  const bool is_done = orphans_.empty() && std::none_of(tasks_.begin(), tasks_.end(),
                                                        [](const Task& task) { return task.is_under_way; });
  if (is_done) let_go();
  return is_done ? Step::kDone : (has_moved ? Step::kMoved : Step::kBlocked);
}

// One step of a lane that has a share. False if the batch is over for what became of it.
bool VerbsBatch::advance(size_t number, bool* has_moved) {
  const Lane::Progress progress = lanes()[number].lane->advance();
  *has_moved |= progress != Lane::Progress::kBlocked;
  switch (progress) {
    case Lane::Progress::kDone:
      finish_task(number);
      break;
    case Lane::Progress::kLost:
      lose(number, Fault::kBroken);
      break;
    case Lane::Progress::kLocalClosed:
      abort(Status::kCanceled);
      return false;
    case Lane::Progress::kRefused:
      reject();
      return false;
    case Lane::Progress::kMoved:
    case Lane::Progress::kBlocked:
      break;
  }
  return true;
}

void VerbsBatch::finish_task(size_t number) {
  const Task& task = tasks_[number];
  const auto now = Lane::Clock::now();
  const auto longest = lanes()[number].lane->take_longest_silence();
  rails().heard_again(number, std::chrono::duration<double>(longest).count());
  rails().arrived(number, task.nbytes, task.load, seconds_between(task.began, now));
  // Where every rail was doubted all are used at once, and what comes whole is the proof.
  rails().proved(number, now);
  counters(number).n_bytes += task.nbytes;
  tasks_[number] = {};
}

// Destroys a lane. What it has not brought is an orphan, and from now on nobody's to write.
void VerbsBatch::lose(size_t number, Fault fault) {
  Connected& connected = lanes()[number];
  Task& task = tasks_[number];
  const auto left = connected.lane->unsettled();
  connected.lane->destroy();
  connected.lane->finish();
  const auto now = Lane::Clock::now();
  (fault == Fault::kBroken ? counters(number).n_broken : counters(number).n_silent)++;
  // What ended the only one, be it the peer's death or its refusal, says nothing of a rail.
  if (lanes().size() > 1) rails().failed(number, now);
  if (!task.is_under_way) return;
  uint64_t n_left = 0;
  for (const uint32_t span : left) n_left += static_cast<uint64_t>(spans_[span].length);
  orphans_.insert(orphans_.end(), left.begin(), left.end());
  counters(number).n_retried_bytes += n_left;
  counters(number).n_bytes += task.nbytes - n_left;
  rails().gave_up(number, task.nbytes, task.nbytes - n_left, seconds_between(task.began, now));
  task = {};
}

// Gives orphans to lanes that are good. False, and the batch aborted, if none is left that may ever be.
bool VerbsBatch::go_on() {
  if (orphans_.empty()) return true;
  if (hand_out(orphans_)) {
    orphans_.clear();
    return true;
  }
  bool may_answer = false;
  for (Connected& connected : lanes()) {
    if (!connected.lane->is_alive()) continue;
    may_answer = true;
    // None that is sound is left: one that has answered, though its rail is still paused, will do.
    if (connected.state == State::kProving && !connected.lane->is_pinged()) {
      connected.state = State::kGood;
      return go_on();
    }
  }
  if (!may_answer) abort(Status::kPeerLost);
  return may_answer;
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
  for (const Connected& connected : lanes()) {
    Lane& lane = *connected.lane;
    if (!lane.is_alive()) continue;
    lane.drain();
    lane.arm();
    fds[n++] = {lane.fd(), POLLIN, 0};
  }
  const Step now = step();  // what came before arm() is not told of
  if (now != Step::kBlocked || is_aborted()) return now;
  const std::chrono::milliseconds look = lanes().size() > 1 ? kLook : kLookAlone;
  const Deadline until = Deadline::until(std::min(deadline.at(), Lane::Clock::now() + look));
  poll(fds, n, until.poll_ms());
  // Who wakes late lives on a busy machine, where others wake late as well.
  const double late = seconds_between(until.at(), Lane::Clock::now());
  for (size_t rail = 0; late > kLate && rail < rails().n(); ++rail) rails().heard_again(rail, late);
  return now;
}

// Local memory is not the devices' any more: all has arrived, or the queue pairs are gone.
void VerbsBatch::let_go() {
  for (const Connected& connected : lanes()) connected.lane->finish();
  use_.reset();
}

void VerbsBatch::quiesce() {
  for (size_t i = 0; i < lanes().size(); ++i) {
    lanes()[i].lane->destroy();
    if (tasks_[i].is_under_way) rails().gave_up(i, tasks_[i].nbytes, 0, 0);
    tasks_[i] = {};
  }
  let_go();
}

}  // namespace p2pkv::verbs
