#include "transports/nccl/line.h"

#include <poll.h>

#include <algorithm>
#include <cstring>

#include "transports/nccl/rest.h"

namespace p2pkv::nccl {
namespace {

// NCCL looks at every device and network when it makes a communicator, which takes it seconds. A guess.
constexpr double kMeetingSeconds = 30.0;
// What a request that nobody waits for any more may hold up the others. A guess.
constexpr std::chrono::milliseconds kHeldUp{250};
// As long as connections of other transports live without being used.
constexpr std::chrono::seconds kUnused{10};

}  // namespace

std::shared_ptr<Line> Line::open(Means* means, std::string_view door, std::string* error) {
  auto line = std::shared_ptr<Line>(new Line(means));
  line->share_ = means->budget.take();
  if (!line->share_) {
    *error = "all " + std::to_string(means->budget.most()) +
             " communicators are in use; nccl's option communicators allows more";
    return nullptr;
  }
  const uint64_t nbytes = kMaxRequests * kMaxRequestBytes;
  line->staging_ = cuda::Staging::create(means->device, nbytes, error);
  if (!line->staging_) return nullptr;
  line->places_ = line->staging_->borrow(nbytes, nbytes, Deadline::after(0));
  line->stream_ = knock(kDoor, door, error);
  if (!line->stream_) return nullptr;
  if (line->thread_.start("p2pkv-nccl-in", [self = line.get()] { self->run(); })) return line;
  *error = "the system has no thread to give";
  return nullptr;
}

bool Line::attach() {
  const std::lock_guard lock(mutex_);
  if (has_ended_) return false;
  ++n_users_;
  return true;
}

void Line::detach() {
  const std::lock_guard lock(mutex_);
  if (--n_users_ == 0) unused_since_ = Clock::now();
}

void Line::post(std::shared_ptr<Intake> intake) {
  bool is_late;
  {
    const std::lock_guard lock(mutex_);
    is_late = has_ended_;
    if (!is_late) posted_.push_back(intake);
  }
  if (is_late) intake->lose();
  wake();
}

void Line::wake() {
  const std::lock_guard lock(mutex_);
  wakeup_.set();
}

void Line::close() {
  const std::lock_guard lock(closing_);
  is_stopping_ = true;
  wake();
  thread_.join();
}

void Line::run() {
  if (meet()) {
    while (serve()) {
    }
  }
  end();
}

// Connects, and meets the owner in a communicator.
bool Line::meet() {
  const Deadline deadline = Deadline::after(kMeetingSeconds);
  while (!is_stopping_ && !deadline.passed() && !is_unused()) {
    take_posted();
    if (!exchange()) return false;
    if (comm_) {
      const Progress progress = comm_->poll();
      if (progress != Progress::kBusy) return progress == Progress::kDone;
    }
    rest(comm_ != nullptr);
  }
  return false;
}

// One turn. False when the line is to end.
bool Line::serve() {
  take_posted();
  ask();
  if (is_stopping_ || !exchange() || !receive() || !land() || is_held_up() || is_unused()) return false;
  const bool is_device_busy = std::any_of(
      asked_.begin(), asked_.end(), [](const Asked& asked) { return asked.is_queued && !asked.is_received; });
  rest(is_device_busy);
  return true;
}

// Sends and takes messages, without waiting for any.
bool Line::exchange() {
  if (!stream_->flush()) return false;
  for (;;) {
    const auto progress = stream_->receive();
    if (progress == SealedStream::Progress::kBlocked) return true;
    if (progress == SealedStream::Progress::kLost || !take_message(stream_->message())) return false;
    nap_ = {};
  }
}

// False if no owner of ours could have said it.
bool Line::take_message(std::string_view message) {
  std::string_view rest;
  switch (kind_of(message)) {
    case kWelcome: {
      WelcomeFrame frame;
      return take_frame(message, &frame, &rest) && take_welcome(frame);
    }
    case kGo: {
      GoFrame frame;
      return take_frame(message, &frame, &rest) && take_go(frame);
    }
    case kVerdict: {
      VerdictFrame frame;
      return take_frame(message, &frame, &rest) && take_verdict(frame, rest);
    }
    default:
      return false;
  }
}

bool Line::take_welcome(const WelcomeFrame& frame) {
  if (comm_) return false;
  std::string error;
  comm_ = Communicator::begin(means_->device, frame.id, 1, means_->options, &error);
  return comm_ != nullptr;
}

Line::Asked* Line::find(uint64_t id) {
  return id - first_id_ < asked_.size() ? &asked_[id - first_id_] : nullptr;
}

bool Line::take_go(const GoFrame& frame) {
  Asked* const asked = find(frame.id);
  if (asked == nullptr || asked->is_coming || asked->verdict || asked->nbytes == 0) return false;
  asked->is_coming = true;
  return true;
}

bool Line::take_verdict(const VerdictFrame& frame, std::string_view words) {
  Asked* const asked = find(frame.id);
  const bool is_gone = frame.status == static_cast<uint32_t>(VerdictStatus::kRegionGone);
  if (asked == nullptr || asked->verdict || words.size() != frame.n_words * sizeof(uint64_t)) return false;
  // Of bytes that were never sent nothing can be vouched for.
  if (!is_gone && asked->nbytes > 0 && !asked->is_coming) return false;
  asked->verdict = frame;
  asked->words = words;
  return true;
}

void Line::take_posted() {
  std::vector<std::shared_ptr<Intake>> posted;
  {
    const std::lock_guard lock(mutex_);
    posted.swap(posted_);
  }
  for (auto& intake : posted) jobs_.push_back({std::move(intake)});
}

// Each intake in turn asks for one request, so that a large batch does not hold up a small one.
void Line::ask() {
  while (!jobs_.empty() && asked_.size() < kMaxRequests) {
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    if (job.intake->is_closed() || job.next == job.intake->n_requests()) continue;
    const std::vector<SpanRequest> spans = job.intake->spans_of(job.next);
    const AskFrame frame{kAsk, static_cast<uint32_t>(spans.size()), first_id_ + asked_.size()};
    stream_->put(bytes_of(frame),
                 {reinterpret_cast<const char*>(spans.data()), spans.size() * sizeof(SpanRequest)});
    Asked asked;
    asked.intake = job.intake;
    asked.request = job.next;
    for (const SpanRequest& span : spans) {
      asked.lengths.push_back(span.length);
      asked.nbytes += span.length;
    }
    asked_.push_back(std::move(asked));
    ++job.next;
    jobs_.push_back(std::move(job));
  }
}

// Has NCCL receive what the owner sends, one request after another.
bool Line::receive() {
  if (queueing_ != nullptr) {
    const Progress progress = comm_->poll();
    if (progress == Progress::kFailed) return false;
    if (progress == Progress::kBusy) return true;
    queueing_->mark = comm_->mark();
    if (!std::exchange(queueing_, nullptr)->mark) return false;
  }
  for (size_t i = 0; i < asked_.size(); ++i) {
    if (asked_[i].is_coming && !asked_[i].is_queued) return receive_into_place(first_id_ + i, asked_[i]);
  }
  return true;
}

bool Line::receive_into_place(uint64_t id, Asked& asked) {
  uint64_t address;
  std::string error;
  uint8_t* const place = places_.data() + id % kMaxRequests * kMaxRequestBytes;
  if (!means_->device->find_address(place, &address, &error)) return false;
  std::vector<Part> parts;
  for (const uint64_t length : asked.lengths) {
    if (length > 0) parts.push_back({address, length});
    address += length;
  }
  asked.is_queued = true;
  queueing_ = &asked;
  nap_ = {};
  return comm_->receive(parts);
}

// Lets go of requests that are over: of those that came, the bytes are believed as far as the owner vouches
// for them, and only after they have all arrived.
bool Line::land() {
  while (!asked_.empty()) {
    Asked& asked = asked_.front();
    if (asked.mark && !asked.is_received) {
      const Progress progress = comm_->look(*asked.mark);
      if (progress == Progress::kFailed) return false;
      asked.is_received = progress == Progress::kDone;
    }
    if (!asked.verdict || asked.is_coming != asked.is_received) return true;
    if (asked.verdict->status != static_cast<uint32_t>(VerdictStatus::kOk)) {
      asked.intake->reject(asked.request);
    } else {
      const uint8_t* place = places_.data() + first_id_ % kMaxRequests * kMaxRequestBytes;
      if (!asked.intake->land(asked.request, place, asked.words)) return false;
    }
    asked_.pop_front();
    ++first_id_;
    held_up_since_.reset();
    nap_ = {};
    ask();
  }
  return true;
}

// Whether a request that was given up, because its deadline has come, still waits for its owner: then there
// is no telling when it ends, and everything behind it waits as well.
bool Line::is_held_up() {
  if (asked_.empty() || !asked_.front().intake->is_closed()) {
    held_up_since_.reset();
    return false;
  }
  if (!held_up_since_) held_up_since_ = Clock::now();
  return Clock::now() - *held_up_since_ >= kHeldUp;
}

bool Line::is_unused() {
  const std::lock_guard lock(mutex_);
  if (n_users_ > 0 || !posted_.empty() || Clock::now() - unused_since_ < kUnused) return false;
  has_ended_ = true;
  return true;
}

void Line::rest(bool is_device_busy) {
  rest_for(*stream_, wakeup_, is_device_busy ? &nap_ : nullptr, held_up_since_ ? kHeldUp : kTick);
}

void Line::end() {
  std::vector<std::shared_ptr<Intake>> posted;
  {
    const std::lock_guard lock(mutex_);
    has_ended_ = true;
    posted.swap(posted_);
  }
  // Before anything that NCCL may take its time for: nothing of theirs is in its hands.
  for (const auto& intake : posted) intake->lose();
  for (const Job& job : jobs_) job.intake->lose();
  for (const Asked& asked : asked_) asked.intake->lose();
  jobs_.clear();
  stream_->shut_down();
  if (comm_ && !comm_->abort()) places_.abandon();
  asked_.clear();
  comm_.reset();
  places_.release();
  staging_.reset();
  stream_.reset();
  share_.reset();
  {
    const std::lock_guard lock(mutex_);
    wakeup_.close();
  }
  is_over_ = true;
}

}  // namespace p2pkv::nccl
