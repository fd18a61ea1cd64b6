#include "transports/nccl/session.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "page/words.h"
#include "transports/nccl/memory.h"
#include "transports/nccl/rest.h"

namespace p2pkv::nccl {
namespace {

// A little more than the reader's patience, so that it is the reader who gives up.
constexpr double kMeetingPatience = 40.0;
// What a reader may leave untaken, as over tcp.
constexpr std::chrono::seconds kStalled{30};

}  // namespace

void Session::serve() {
  // For as long as it has a communicator; a reader that is turned away reads over another transport.
  const std::unique_ptr<Budget::Share> share = means_->budget.take();
  if (share && meet()) {
    while (turn()) {
    }
  }
  stream_.shut_down();
  comm_.reset();      // after which nothing is sent any more,
  requests_.clear();  // and regions may go
}

void Session::stop() {
  is_stopping_ = true;
  wakeup_.set();
}

// Names a communicator to the reader, and meets it there.
bool Session::meet() {
  UniqueId id;
  Result result = 0;
  std::string error;
  const auto make_id = [&] { result = Api::get().get_unique_id(&id); };
  if (!means_->device->run_inside(make_id, &error) || result != kSuccess) return false;
  stream_.put(bytes_of(WelcomeFrame{kWelcome, 0, id}), {});
  if (!stream_.flush()) return false;
  comm_ = Communicator::begin(means_->device, id, 0, means_->options, &error);
  if (!comm_) return false;
  const Deadline deadline = Deadline::after(kMeetingPatience);
  while (!is_stopping_ && !deadline.passed() && exchange()) {
    const Progress progress = comm_->poll();
    if (progress != Progress::kBusy) return progress == Progress::kDone;
    rest_for(stream_, wakeup_, &nap_, kTick);
  }
  return false;
}

// False when the session is to end.
bool Session::turn() {
  if (is_stopping_ || !exchange() || !send() || !answer() || is_stuck()) return false;
  rest();
  return true;
}

bool Session::exchange() {
  if (!stream_.flush()) return false;
  for (;;) {
    const auto progress = stream_.receive();
    if (progress == SealedStream::Progress::kBlocked) return true;
    if (progress == SealedStream::Progress::kLost || !take_ask(stream_.message())) return false;
  }
}

// False for what no reader of ours says; its count is looked at before anything is allocated for it.
bool Session::take_ask(std::string_view message) {
  AskFrame frame;
  std::string_view spans;
  if (kind_of(message) != kAsk || !take_frame(message, &frame, &spans)) return false;
  const bool is_sane = frame.n_spans > 0 && frame.n_spans <= kMaxSpans &&
                       spans.size() == frame.n_spans * sizeof(SpanRequest) && requests_.size() < kMaxRequests;
  if (!is_sane) return false;
  Request request;
  request.id = frame.id;
  request.spans.resize(frame.n_spans);
  std::memcpy(request.spans.data(), spans.data(), spans.size());
  if (!is_valid(request)) return false;
  requests_.push_back(std::move(request));
  nap_ = {};
  return true;
}

// The reader has refused what is out of range already: one that asks for it here is not one of ours.
bool Session::is_valid(Request& request) const {
  const uint32_t id = request.spans[0].region;
  request.region = regions_->find(id);
  for (const SpanRequest& span : request.spans) {
    if (span.want_word > 1 || span.region != id || span.length > kMaxRequestBytes) return false;
    request.nbytes += span.length;
    if (!request.region) continue;
    const uint64_t nbytes = request.region->nbytes();
    const bool bytes_fit = lies_within(span.offset, span.length, nbytes);
    const bool word_fits = span.want_word == 0 || word_lies_within(span.word_offset, nbytes);
    if (!bytes_fit || !word_fits) return false;
  }
  return request.nbytes <= kMaxRequestBytes;
}

// Has NCCL send requests in the order in which they came, one after another.
bool Session::send() {
  if (queueing_ != nullptr) {
    const Progress progress = comm_->poll();
    if (progress == Progress::kFailed) return false;
    if (progress == Progress::kBusy) return true;
    queueing_->mark = comm_->mark();
    if (!std::exchange(queueing_, nullptr)->mark) return false;
  }
  for (Request& request : requests_) {
    if (request.is_begun) continue;
    if (!begin(request)) return false;
    if (queueing_ != nullptr) break;
  }
  return true;
}

// The reader is told at once: the first time, NCCL takes a send only when the other side receives.
bool Session::begin(Request& request) {
  request.is_begun = true;
  request.since = Clock::now();
  if (!request.region) return true;
  request.use = std::make_unique<RegisteredRegion::Use>(*request.region);
  if (!*request.use) request.region.reset();
  if (!request.region || request.nbytes == 0) return true;
  const uint64_t base = static_cast<const LockedMemory*>(request.region->registration())->address();
  std::vector<Part> parts;
  for (const SpanRequest& span : request.spans) {
    if (span.length > 0) parts.push_back({base + span.offset, span.length});
  }
  queueing_ = &request;
  nap_ = {};
  if (!comm_->send(parts)) return false;
  stream_.put(bytes_of(GoFrame{kGo, 0, request.id}), {});
  return true;
}

// Answers requests whose bytes nothing reads any more.
bool Session::answer() {
  while (!requests_.empty() && requests_.front().is_begun) {
    Request& request = requests_.front();
    if (request.region && request.nbytes > 0) {
      if (!request.mark) break;
      const Progress progress = comm_->look(*request.mark);
      if (progress == Progress::kFailed) return false;
      if (progress == Progress::kBusy) break;
    }
    say_verdict(request);
    requests_.pop_front();
    nap_ = {};
  }
  return stream_.flush();
}

void Session::say_verdict(Request& request) {
  std::vector<uint64_t> words;
  for (const SpanRequest& span : request.spans) {
    if (request.region && span.want_word == 1)
      words.push_back(load_word_after_bytes(request.region->base() + span.word_offset));
  }
  const auto status = static_cast<uint32_t>(request.region ? VerdictStatus::kOk : VerdictStatus::kRegionGone);
  const VerdictFrame frame{kVerdict, status, request.id, static_cast<uint32_t>(words.size()), 0};
  stream_.put(bytes_of(frame),
              {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(uint64_t)});
}

// Whether a reader takes nothing, or somebody waits to close what is being sent to it.
bool Session::is_stuck() const {
  return std::any_of(requests_.begin(), requests_.end(), [](const Request& request) {
    if (!request.is_begun || !request.use) return false;
    return request.region->is_closing() || Clock::now() - request.since > kStalled;
  });
}

void Session::rest() {
  const bool is_sending = std::any_of(requests_.begin(), requests_.end(),
                                      [](const Request& request) { return request.is_begun; });
  rest_for(stream_, wakeup_, is_sending ? &nap_ : nullptr, kTick);
}

}  // namespace p2pkv::nccl
