#include "cuda/events.h"

#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace p2pkv::cuda {
namespace {

// A copy of a few MiB takes some 100 us: that long a core is worth less than the delay of being woken.
constexpr auto kSpin = std::chrono::microseconds(200);
// Then naps are a part of what it took so far, so that this is about all they can add to it. The kernel makes
// each some 50 us longer.
constexpr auto kPartOfTaken = 8;
constexpr auto kLongestNap = std::chrono::microseconds(500);

class EventMark final : public StreamMark {
 public:
  EventMark(const Driver& driver, std::shared_ptr<Device> device, ContextHandle context, EventHandle event)
      : driver_(driver), device_(std::move(device)), context_(context), event_(event) {}

  ~EventMark() override {
    if (getpid() != pid_) return;  // in a forked child no driver call works
    const CurrentContext current(driver_, context_);
    driver_.event_destroy(event_);  // may be done before the event has come
  }

  StreamOutcome wait(const Deadline& deadline, std::string* error) override {
    const CurrentContext current(driver_, context_);
    Result result = current.result();
    if (result == kSuccess) result = await_event(driver_, event_, &deadline);
    if (result == kSuccess) return StreamOutcome::kDone;
    if (result == kNotReady) return StreamOutcome::kTimedOut;
    *error = "CUDA device " + std::to_string(device_->ordinal()) + ": " +
             driver_.describe("waiting for a stream", result);
    return StreamOutcome::kFailed;
  }

 private:
  const Driver& driver_;
  const std::shared_ptr<Device> device_;  // keeps the context
  const ContextHandle context_;
  const EventHandle event_;
  const pid_t pid_ = getpid();
};

}  // namespace

Result await_event(const Driver& driver, EventHandle event, const Deadline* deadline) {
  const auto began = Deadline::Clock::now();
  while (true) {
    const Result result = driver.event_query(event);
    if (result != kNotReady) return result;
    if (deadline != nullptr && deadline->passed()) return kNotReady;
    const auto taken = Deadline::Clock::now() - began;
    if (taken < kSpin) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(std::min<Deadline::Clock::duration>(taken / kPartOfTaken, kLongestNap));
  }
}

std::unique_ptr<StreamMark> mark_stream(const Driver& driver, std::shared_ptr<Device> device,
                                        ContextHandle context, StreamHandle stream, std::string* error) {
  const auto fail = [&](const char* call, Result result) {
    *error = "CUDA device " + std::to_string(device->ordinal()) + ": " + driver.describe(call, result);
    return nullptr;
  };
  const CurrentContext current(driver, context);
  if (current.result() != kSuccess) return fail("cuCtxPushCurrent", current.result());
  EventHandle event;
  Result result = driver.event_create(&event, kEventDisableTiming);
  if (result != kSuccess) return fail("cuEventCreate", result);
  auto made = std::make_unique<EventMark>(driver, device, context, event);
  result = driver.event_record(event, stream);
  if (result != kSuccess) return fail("cuEventRecord", result);
  return made;
}

Result Events::take(EventHandle* event) {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      *event = idle_.back();
      idle_.pop_back();
      return kSuccess;
    }
  }
  return driver_.event_create(event, kEventDisableTiming);
}

void Events::give_back(EventHandle event) {
  const std::lock_guard lock(mutex_);
  idle_.push_back(event);
}

void Events::end() {
  const std::lock_guard lock(mutex_);
  for (EventHandle event : idle_) driver_.event_destroy(event);
  idle_.clear();
}

}  // namespace p2pkv::cuda
