// Events of streams: what has been queued on one before a moment, and waiting for it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/driver.h"

namespace p2pkv::cuda {

// Asks until the event's work is done, has failed, or the deadline (none: never) has passed; that it has is
// kNotReady. First in a spin, then with naps. Within the event's context.
Result await_event(const Driver& driver, EventHandle event, const Deadline* deadline);

// Records an event on a stream of `device`, or of another context of its. Null, with the reason in `error`.
std::unique_ptr<StreamMark> mark_stream(const Driver& driver, std::shared_ptr<Device> device,
                                        ContextHandle context, StreamHandle stream, std::string* error);

// Events of one context that are used again. Thread-safe.
class Events {
 public:
  explicit Events(const Driver& driver) : driver_(driver) {}

  // Within the context, as `end`.
  Result take(EventHandle* event);
  void give_back(EventHandle event);
  // Destroys those that were given back.
  void end();

 private:
  const Driver& driver_;
  std::mutex mutex_;               // guards idle_
  std::vector<EventHandle> idle_;  // as many as there were in use at a time
};

}  // namespace p2pkv::cuda
