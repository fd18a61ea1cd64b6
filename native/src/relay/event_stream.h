// Whole events of a stream (Server-Sent Events), however an engine's bytes are cut into pieces.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace p2pkv {

// Holds back the beginning of an event until its end is there: it may never come, and what a client was sent
// must end between two events, so that it can be told that no more come. Every byte is looked at once, and
// what is held back has a limit: one engine's endless line must not cost the loop that serves everybody. Not
// thread-safe.
class EventStream {
 public:
  static constexpr size_t kMaxEvent = 1
                                      << 20;  // the largest have the log-probabilities of some hundred tokens

  // Appends the whole events that are there with `data` to `events`. False: an event has more than kMaxEvent
  // bytes.
  bool feed(std::string_view data, std::string& events);

  // Nothing is held back.
  bool is_between() const { return held_.empty(); }
  // The event by which engines say that a stream is whole was there.
  bool is_done() const { return is_done_; }

 private:
  std::string held_;
  bool is_done_ = false;
};

}  // namespace p2pkv
