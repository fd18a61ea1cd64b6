// How the two ends of a line wait for each other: awake for a moment, asleep for the rest.
//
// Each end has a word that says what it has done last, a request or an answer, and one that says whether it
// is awake. Who is awake sees the other's word by himself; who sleeps is sent a packet. Both store their own
// word first and look at the other's then, in one order that both agree on, so that nobody sleeps over what
// was done before.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

#include "attach/frames.h"
#include "base/clock.h"
#include "net/packets.h"

namespace p2pkv::attaching {

// Wakes the other end unless it is awake. What it can't be sent, because it has not read what it was sent
// before, it needs not: that wakes it. False: there is nobody at the other end.
inline bool wake(int connection, const uint64_t& is_awake, uint64_t id) {
  return load_word_of(is_awake) != 0 || send_packet(connection, Call{kCallMagic, 0, id}) || errno == EAGAIN ||
         errno == EINTR;
}

// Used by one thread.
class Waiting {
 public:
  enum class Woken { kSeen, kLate, kLost };

  // `is_awake`: the own word.
  Waiting(int connection, uint64_t* is_awake) : connection_(connection), is_awake_(*is_awake) {}

  // Waits until `is_there()`, which looks at the other end's word, says so.
  template <typename IsThere>
  Woken until(const IsThere& is_there, const Deadline& deadline) {
    store_word_of(is_awake_, 1);
    bool is_expected = false;
    for (;;) {
      if (stay_awake(is_there, deadline, is_expected)) return Woken::kSeen;
      store_word_of(is_awake_, 0);
      const bool is_seen = is_there();  // or it was done while this end was awake, and nobody says so
      const bool is_woken = !is_seen && wait_readable(connection_, deadline);
      store_word_of(is_awake_, 1);
      if (is_seen) return Woken::kSeen;
      const Received last = is_woken ? take_calls() : Received::kNothing;
      if (is_there()) return Woken::kSeen;
      if (last != Received::kNothing) return Woken::kLost;
      if (!is_woken) return Woken::kLate;
      is_expected = true;  // a call may come ahead of what it calls for
    }
  }

 private:
  // Measured between two processes: a thread that sleeps is back after 15 to 60 us, and a core that has gone
  // to sleep with it takes longest. What does not come within this comes from a busy machine, or not at all.
  static constexpr std::chrono::microseconds kAwake{60};
  // After so many waits that were in vain only one of kTrialEvery is tried: waiting awake takes a core. A
  // core that others want has it dearer: who yields it is back when they have had their turns, after 3 ms
  // each.
  static constexpr uint32_t kMostInVain = 4;
  static constexpr uint32_t kTrialEvery = 16;
  static constexpr uint32_t kCrowdedTrialEvery = 256;

  template <typename IsThere>
  bool stay_awake(const IsThere& is_there, const Deadline& deadline, bool is_expected) {
    if (is_there()) return true;
    const bool is_trial = is_worth_trying();
    if (!is_trial && !is_expected) return false;
    // This end gives no core away that others want while it waits for what it was called for: that comes in a
    // moment.
    const bool yields = is_trial || !is_crowded_;
    auto now = Deadline::Clock::now();
    const auto end = std::min(deadline.at(), now + kAwake);
    bool is_seen = false;
    while (!is_seen && now < end) {
      if (yields) sched_yield();  // where another thread has a use for this core, it has it
      is_seen = is_there();
      const auto before = std::exchange(now, Deadline::Clock::now());
      if (yields) is_crowded_ = now - before > kAwake;
    }
    if (is_crowded_) {
      n_in_vain_ = kMostInVain;  // it may have been seen, but by one who came too late for it
    } else {
      n_in_vain_ = is_seen ? 0 : n_in_vain_ + 1;
    }
    return is_seen;
  }

  bool is_worth_trying() {
    return n_in_vain_ < kMostInVain || ++n_waits_ % (is_crowded_ ? kCrowdedTrialEvery : kTrialEvery) == 0;
  }

  // Reads whatever was sent; kNothing, unless the other end has gone or has sent something else.
  Received take_calls() {
    for (;;) {
      Call call;
      const Received received = receive_packet(connection_, &call);
      if (received != Received::kPacket) return received;
      if (call.magic != kCallMagic) return Received::kWrong;
    }
  }

  const int connection_;
  uint64_t& is_awake_;
  uint32_t n_in_vain_ = 0;
  uint32_t n_waits_ = 0;
  bool is_crowded_ = false;  // others wanted this core when it was last yielded
};

}  // namespace p2pkv::attaching
