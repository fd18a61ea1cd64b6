#include "transports/tcp/batch.h"

#include <poll.h>

#include <algorithm>
#include <utility>

namespace p2pkv::tcp {
namespace {

// Below this, waking a helper costs more than its stream brings (a guess from wake-ups of 50 us at 4 GB/s).
constexpr uint64_t kSpreadFromBytes = 1 << 20;
// A stream that owes more is not worth keeping: a connection costs less than such an answer to nobody.
constexpr uint64_t kMostOwed = 16 << 20;
// A batch that is smaller does not show what a stream more or less brings.
constexpr uint64_t kMeasuredFromBytes = 4 << 20;
// Steps of one done(), so that it does not block for long; each moves at most what a socket buffer holds.
constexpr int kStepsPerPoll = 8;
// Likewise of what is dropped at a time.
constexpr int kDroppingSteps = 16;

// Seconds; poll(2) counts in milliseconds.
constexpr double kLate = 0.002;

double seconds_between(Deadline::Clock::time_point from, Deadline::Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

TcpBatch::TcpBatch(std::shared_ptr<TcpEndpoint> endpoint, std::shared_ptr<AttachedRegion> remote, Reads reads)
    : Batch(std::move(reads)),
      endpoint_(std::move(endpoint)),
      remote_(std::move(remote)),
      tasks_(endpoint_->strands_.size()) {}

void TcpBatch::start() {
  began_ = looked_ = Deadline::Clock::now();
  n_bytes_ = n_pending_bytes(spans_, statuses_);
  hear_proofs(began_);
  auto spans = pending_spans(statuses_);
  if (!hand_out(spans)) orphans_ = std::move(spans);  // drive() finds that nobody can
  for (size_t i = 0; i < tasks_.size(); ++i) {
    if (!tasks_[i].is_under_way) strands()[i]->stream.flush();  // the greeting
  }
}

// Takes what streams owe that were pinged or abandoned.
void TcpBatch::hear_proofs(Time now) {
  for (size_t i = 0; i < tasks_.size(); ++i) {
    if (strands()[i]->state != Strand::State::kDead && !tasks_[i].is_under_way) hear_proof(i, now);
  }
}

void TcpBatch::hear_proof(size_t number, Time now) {
  Strand& strand = *strands()[number];
  if (strand.is_pinged) {
    Progress progress = Progress::kMoved;
    for (int step = 0; progress == Progress::kMoved && step < kDroppingSteps; ++step) {
      progress = strand.stream.advance();
    }
    strand.is_pinged = progress == Progress::kBlocked || progress == Progress::kMoved;
    const bool is_broken = !strand.is_pinged && progress != Progress::kDone;
    if (is_broken || is_gone(number, now)) {
      lose(number, is_broken ? Fault::kBroken : Fault::kSilent);
      return;
    }
  }
  if (strand.state == Strand::State::kSuspected && !strand.is_pinged) {
    rails().heard_again(strand.rail, static_cast<double>(strand.stream.longest_silence_ns()) / 1e9);
    strand.state = Strand::State::kGood;
    strand.is_counted = false;
  }
  if (strand.state != Strand::State::kProving) return;
  const double waited = static_cast<double>(steady_now_ns() - strand.opened_ns) / 1e9;
  if (!strand.is_pinged) {
    rails().proved(strand.rail, now);
    if (!rails().is_doubted(strand.rail)) strand.state = Strand::State::kGood;
  } else if (waited > rails().patience(strand.rail)) {
    rails().failed(strand.rail, now);
  }
}

// Only one stream of all that have a share may lack a helper: that of the driving thread.
std::vector<std::vector<size_t>> TcpBatch::idle_strands(bool is_for_one) {
  std::vector<std::vector<size_t>> idle(rails().n());
  bool may_lack_helper = own_ == kNobody;
  for (size_t i = 0; i < tasks_.size(); ++i) {
    Strand& strand = *strands()[i];
    if (strand.state != Strand::State::kGood || strand.is_pinged || tasks_[i].is_under_way) continue;
    const bool needs_helper = !may_lack_helper || !is_for_one;
    if (needs_helper && !strand.helper && !std::exchange(may_lack_helper, false)) {
      ThreadOwner<Helper> helper(new Helper);
      if (!helper->start()) continue;
      strand.helper = std::move(helper);
    }
    idle[strand.rail].push_back(i);
  }
  return idle;
}

// Gives the spans to streams that have nothing to do; false if there is none.
bool TcpBatch::hand_out(const std::vector<uint32_t>& spans) {
  uint64_t n_bytes = 0;
  for (const uint32_t span : spans) n_bytes += static_cast<uint64_t>(spans_[span].length);
  const bool is_large = n_bytes >= kSpreadFromBytes;
  const auto idle = idle_strands(!is_large);
  RailSet usable{};
  for (size_t rail = 0; rail < idle.size(); ++rail) usable[rail] = !idle[rail].empty();
  const auto n_usable = std::count(usable.begin(), usable.end(), true);
  if (n_usable == 0) return false;

  const auto of_rail = share_by_rail(rails(), usable, spans_, words_, spans, is_large && n_usable > 1);

  const bool measures = endpoint_->home_.n_streams == 0 && n_bytes >= kMeasuredFromBytes && orphans_.empty();
  n_measured_ = measures ? endpoint_->ports_->streams.next(endpoint_->n_per_rail_) : 0;
  std::vector<std::pair<size_t, Share>> given;  // by the stream's number
  for (size_t rail = 0; rail < idle.size(); ++rail) {
    if (of_rail[rail].empty()) continue;
    size_t n_streams = is_large ? idle[rail].size() : 1;
    if (measures) n_streams = std::min(n_streams, n_measured_);
    auto shares = split_list(spans_, words_, of_rail[rail], n_streams);
    for (size_t i = 0; i < shares.size(); ++i) given.emplace_back(idle[rail][i], std::move(shares[i]));
  }
  const auto has_helper = [this](const auto& one) { return strands()[one.first]->helper != nullptr; };
  std::stable_partition(given.begin(), given.end(), [&](const auto& one) { return !has_helper(one); });
  for (auto& [number, share] : given) begin(number, std::move(share));
  return true;
}

void TcpBatch::begin(size_t number, Share share) {
  Strand& strand = *strands()[number];
  Task& task = tasks_[number];
  task = {true, share.nbytes, rails().n_bytes_in_flight(strand.rail), Deadline::Clock::now(), {}, {}};
  ++n_under_way_;
  strand.stream.begin({local_.get(), remote_->id, &spans_, &words_, &statuses_}, std::move(share.spans));
  if (own_ == kNobody) {
    own_ = number;
    return;
  }
  // counted one by one: the batch's end waits for helpers that were given something, and for no others
  std::function<void()> work = [this, number] { help(number); };
  {
    const std::lock_guard lock(helpers_mutex_);
    ++n_helping_;
  }
  strand.helper->give(std::move(work));
}

void TcpBatch::help(size_t number) {
  Stream& stream = strands()[number]->stream;
  const Helper& helper = *strands()[number]->helper;
  Progress progress = Progress::kBlocked;
  while (!is_aborted() && !helper.is_called_off()) {
    progress = stream.advance();
    if (progress == Progress::kBlocked) {
      // Without a deadline: what ends the batch also shuts the socket down, and that wakes this.
      pollfd fds[] = {{stream.fd(), stream.events(), 0}, {helper.called_off_fd(), POLLIN, 0}};
      poll(fds, 2, -1);
    } else if (progress != Progress::kMoved) {
      break;
    }
  }
  const std::lock_guard lock(helpers_mutex_);
  tasks_[number].ended = progress;
  has_ended_ = true;
  --n_helping_;
  helpers_ended_.notify_all();
}

bool TcpBatch::drive(const Deadline* deadline) {
  for (int step = 0; !is_aborted(); ++step) {
    const Progress own = own_ != kNobody ? strands()[own_]->stream.advance() : Progress::kBlocked;
    if (!take_own(own) || !collect() || !go_on()) return false;
    if (n_under_way_ == 0 && orphans_.empty()) {
      const double ns = seconds_between(began_, Deadline::Clock::now()) * 1e9;
      if (n_measured_ > 0) endpoint_->ports_->streams.took(n_measured_, ns / static_cast<double>(n_bytes_));
      return true;
    }
    if (!look_after(Deadline::Clock::now())) return false;
    if (deadline ? deadline->passed() : step == kStepsPerPoll) return false;
    if (own == Progress::kBlocked) {
      if (!deadline) return false;
      rest(*deadline);
    }
  }
  return false;
}

bool TcpBatch::take_own(Progress progress) {
  if (progress == Progress::kMoved || progress == Progress::kBlocked) return true;
  return settle_task(std::exchange(own_, kNobody), progress);
}

bool TcpBatch::collect() {
  if (!has_ended_.exchange(false)) return true;
  std::vector<std::pair<size_t, Progress>> ended;
  {
    const std::lock_guard lock(helpers_mutex_);
    for (size_t i = 0; i < tasks_.size(); ++i) {
      if (tasks_[i].ended) ended.emplace_back(i, *std::exchange(tasks_[i].ended, std::nullopt));
    }
  }
  for (const auto& [number, progress] : ended) {
    if (!settle_task(number, progress)) return false;
  }
  return true;
}

bool TcpBatch::settle_task(size_t number, Progress progress) {
  if (is_aborted()) return false;  // what ends now was shut down here, and says nothing of its rail
  switch (progress) {
    case Progress::kDone:
      finish_task(number);
      return true;
    case Progress::kLocalClosed:
      give_up(Status::kCanceled);
      return false;
    case Progress::kLost:
      return lose(number, Fault::kBroken);
    case Progress::kMoved:
    case Progress::kBlocked:  // it was called off
      abandon(number, *tasks_[number].called_off);
  }
  return true;
}

void TcpBatch::finish_task(size_t number) {
  const Strand& strand = *strands()[number];
  const Task& task = tasks_[number];
  rails().heard_again(strand.rail, static_cast<double>(strand.stream.longest_silence_ns()) / 1e9);
  const auto now = Deadline::Clock::now();
  rails().arrived(strand.rail, task.nbytes, task.load, seconds_between(task.began, now));
  // Where every rail was doubted all are used at once, and what comes whole is the proof.
  if (rails().n() > 1) rails().proved(strand.rail, now);
  endpoint_->home_.counters->rails[strand.rail].n_bytes += task.nbytes;
  tasks_[number] = {};
  --n_under_way_;
}

// The stream is done for: what it has not brought is an orphan. False if there is no other.
bool TcpBatch::lose(size_t number, Fault fault) {
  Strand& strand = *strands()[number];
  strand.stream.shut_down();
  count(number, fault);
  strand.state = Strand::State::kDead;
  if (rails().n() == 1) {
    // What ended one stream of a rail, be it the owner's death or its refusal, is true of the others.
    give_up(Status::kPeerLost);
    return false;
  }
  if (fault != Fault::kLate) rails().failed(strand.rail, Deadline::Clock::now());
  give_back(number);
  return true;
}

// The stream may be sound: its share is an orphan, and it is given nothing before it has brought what it
// owes.
void TcpBatch::abandon(size_t number, Fault fault) {
  Strand& strand = *strands()[number];
  if (strand.stream.n_owed() > kMostOwed) {
    lose(number, fault);
    return;
  }
  count(number, fault);
  give_back(number);
  strand.stream.abandon();
  strand.state = Strand::State::kSuspected;
  strand.is_pinged = true;
  if (fault != Fault::kSilent) return;
  // Nor is what it leaves given to another one that may lead nowhere.
  for (size_t i = 0; i < tasks_.size(); ++i) {
    Strand& fellow = *strands()[i];
    if (fellow.rail != strand.rail || fellow.state != Strand::State::kGood || tasks_[i].is_under_way)
      continue;
    fellow.state = Strand::State::kSuspected;
    ping(i);
  }
}

void TcpBatch::give_back(size_t number) {
  const Strand& strand = *strands()[number];
  Task& task = tasks_[number];
  if (!task.is_under_way) return;
  auto& counters = endpoint_->home_.counters->rails[strand.rail];
  const auto left = strand.stream.unsettled();
  orphans_.insert(orphans_.end(), left.begin(), left.end());
  for (const uint32_t span : left) counters.n_retried_bytes += static_cast<uint64_t>(spans_[span].length);
  counters.n_bytes += strand.stream.n_bytes();
  const double seconds = seconds_between(task.began, Deadline::Clock::now());
  rails().gave_up(strand.rail, task.nbytes, strand.stream.n_bytes(), seconds);
  task = {};
  --n_under_way_;
}

void TcpBatch::count(size_t number, Fault fault) {
  Strand& strand = *strands()[number];
  if (std::exchange(strand.is_counted, true)) return;
  auto& counters = endpoint_->home_.counters->rails[strand.rail];
  (fault == Fault::kBroken   ? counters.n_broken
   : fault == Fault::kSilent ? counters.n_silent
                             : counters.n_late)++;
}

// Gives orphans to streams that have nothing to do, as soon as there are any. False if no stream is left.
bool TcpBatch::go_on() {
  if (orphans_.empty()) return true;
  if (hand_out(orphans_)) {
    orphans_.clear();
    return true;
  }
  if (n_under_way_ > 0) return true;
  bool has_sound = false, may_answer = false;
  for (const auto& strand : strands()) {
    has_sound |= strand->state == Strand::State::kGood;
    may_answer |= strand->state != Strand::State::kDead;
  }
  // None that is sound is left: one that has answered, though its rail is still paused, will do.
  for (const auto& strand : strands()) {
    if (has_sound || strand->state != Strand::State::kProving || strand->is_pinged) continue;
    strand->state = Strand::State::kGood;
    return go_on();
  }
  if (!may_answer) give_up(Status::kPeerLost);
  return may_answer;
}

// Sleeps until something comes, some helper ends, or streams should be looked after.
void TcpBatch::rest(const Deadline& deadline) {
  const Deadline until = Deadline::until(std::min(deadline.at(), Deadline::Clock::now() + kLook));
  if (own_ != kNobody) {
    Stream& stream = strands()[own_]->stream;
    const bool is_alone = rails().n() == 1 && n_under_way_ == 1;  // nobody else to look after
    pollfd fd{stream.fd(), stream.events(), 0};
    poll(&fd, 1, (is_alone ? deadline : until).poll_ms());
  } else {
    std::unique_lock lock(helpers_mutex_);
    helpers_ended_.wait_until(lock, until.at(), [this] { return has_ended_.load(); });
  }
  // Who wakes late lives on a busy machine, where others wake late as well.
  const double late = seconds_between(until.at(), Deadline::Clock::now());
  for (size_t rail = 0; late > kLate && rail < rails().n(); ++rail) rails().heard_again(rail, late);
}

void TcpBatch::quiesce() {
  std::unique_lock lock(helpers_mutex_);
  helpers_ended_.wait(lock, [this] { return n_helping_ == 0; });
  for (size_t i = 0; i < tasks_.size(); ++i) {
    if (!tasks_[i].is_under_way) continue;
    rails().gave_up(strands()[i]->rail, tasks_[i].nbytes, 0, 0);
    tasks_[i] = {};
  }
}

}  // namespace p2pkv::tcp
