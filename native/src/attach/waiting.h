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

// This is what the word of an end says that is awake, on a core that nobody knows: those of earlier versions
// say no more.
constexpr uint64_t kSomewhere = 1;

// This is what it says of an end that is awake on the core where it is called. 0 says that it sleeps.
inline uint64_t awake_here() {
  const int core = sched_getcpu();
  return core < 0 ? kSomewhere : kSomewhere + 1 + static_cast<uint64_t>(core);
}

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

  // `is_awake` is the own word, and `is_other_awake` that of the other end.
  Waiting(int connection, uint64_t* is_awake, const uint64_t* is_other_awake)
      : connection_(connection), is_awake_(*is_awake), is_other_awake_(*is_other_awake) {}

  // Waits until `is_there()`, which looks at the other end's word, says so.
  template <typename IsThere>
  Woken until(const IsThere& is_there, const Deadline& deadline) {
    store_word_of(is_awake_, awake_here());
    bool is_called = false;
    for (;;) {
      if (stay_awake(is_there, deadline, is_called)) return Woken::kSeen;
      store_word_of(is_awake_, 0);
      const bool is_seen = is_there();  // or it was done while this end was awake, and nobody says so
      const bool is_woken = !is_seen && wait_readable(connection_, deadline);
      store_word_of(is_awake_, awake_here());
      if (is_seen) return Woken::kSeen;
      const Received last = is_woken ? take_calls() : Received::kNothing;
      if (is_there()) return Woken::kSeen;
      if (last != Received::kNothing) return Woken::kLost;
      if (!is_woken) return Woken::kLate;
      is_called = true;  // a call may come ahead of what it calls for
    }
  }

 private:
  // Measured between two processes: a thread that sleeps is back after 15 to 60 us, and a core that has gone
  // to sleep with it takes longest. What does not come within this comes from a busy machine, or not at all.
  static constexpr std::chrono::microseconds kAwake{60};
  // After so many waits that were in vain only one of kTrialEvery is tried: waiting awake takes a core. A
  // core that others want has it dearer: who yields it is back when they have had their turns, after 3 ms
  // each. So each trial that finds it wanted doubles the number up to the next, and one that doesn't halves
  // it: on an idle machine the other end itself wants the core now and then, for once.
  static constexpr uint32_t kMostInVain = 4;
  static constexpr uint32_t kTrialEvery = 16;
  static constexpr uint32_t kMostTrialEvery = 256;

  // Whether waiting awake has paid lately.
  class Trials {
   public:
    bool is_worth_one(uint32_t every) { return n_in_vain_ < kMostInVain || ++n_waits_ % every == 0; }
    void took(bool has_paid) { n_in_vain_ = has_paid ? 0 : n_in_vain_ + 1; }
    void give_up() { n_in_vain_ = kMostInVain; }

   private:
    uint32_t n_in_vain_ = 0;
    uint32_t n_waits_ = 0;
  };

  template <typename IsThere>
  bool stay_awake(const IsThere& is_there, const Deadline& deadline, bool is_called) {
    if (is_there()) return true;
    if (is_called && is_on_this_core()) return false;
    Trials& trials = is_called ? called_ : uncalled_;
    if (!trials.is_worth_one(is_crowded_ && !is_called ? crowded_trial_every_ : kTrialEvery)) return false;
    // This end gives no core away that others want while it waits for what it was called for: that comes in a
    // moment.
    const bool yields = !is_called || !is_crowded_;
    auto now = Deadline::Clock::now();
    const auto end = std::min(deadline.at(), now + kAwake);
    bool is_seen = false;
    while (!is_seen && now < end) {
      if (yields) sched_yield();  // where another thread has a use for this core, it has it
      is_seen = is_there();
      const auto before = std::exchange(now, Deadline::Clock::now());
      if (yields) is_crowded_ = now - before > kAwake;
    }
    trials.took(is_seen);
    if (is_crowded_) uncalled_.give_up();  // it may have been seen, but by one who came too late for it
    if (yields) {
      crowded_trial_every_ = is_crowded_ ? std::min(2 * crowded_trial_every_, kMostTrialEvery)
                                         : std::max(crowded_trial_every_ / 2, kTrialEvery);
    }
    return is_seen;
  }

  // Whether the other end is awake on this core: it can't go on while this one is.
  bool is_on_this_core() const {
    const uint64_t here = awake_here();
    return here != kSomewhere && load_word_of(is_other_awake_) == here;
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
  const uint64_t& is_other_awake_;
  Trials uncalled_, called_;
  bool is_crowded_ = false;  // others wanted this core when it was last yielded
  uint32_t crowded_trial_every_ = kTrialEvery;
};

}  // namespace p2pkv::attaching
