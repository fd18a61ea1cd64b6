#include "peers/pace.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace p2pkv {

size_t Pace::class_of(uint64_t nbytes) {
  return std::clamp<size_t>(static_cast<size_t>(std::bit_width(nbytes)), 1, kClasses - 1);
}

int64_t Pace::guess_ns(uint64_t nbytes) {
  const uint64_t bounded = std::min<uint64_t>(nbytes, uint64_t{1} << 40);
  return kGuessNs + kGuessNsAByte * static_cast<int64_t>(bounded);
}

Pace::Patience Pace::patience(uint64_t nbytes) const {
  return patience(class_of(nbytes), guess_ns(nbytes));
}

Pace::Patience Pace::patience_connecting() const {
  Patience connecting = patience(kConnecting, kConnectingGuessNs);
  connecting.late = std::max<Clock::duration>(connecting.late, std::chrono::nanoseconds(kGuessNs / 2));
  return connecting;
}

Pace::Patience Pace::patience(size_t index, int64_t guess_ns) const {
  const int64_t ns = classes_[index].ns.load(std::memory_order_relaxed);
  const bool is_guessed = !has_told(index);
  const int64_t late_ns = is_guessed ? std::max(guess_ns, 2 * ns) : 2 * ns;
  return {std::max<Clock::duration>(std::chrono::nanoseconds(late_ns), kFloor),
          std::chrono::nanoseconds(is_guessed ? 0 : ns)};
}

void Pace::note(uint64_t nbytes, Clock::duration took) {
  note_class(class_of(nbytes), took, guess_ns(nbytes));
}

void Pace::note_connected(Clock::duration took) {
  note_class(kConnecting, took, kConnectingGuessNs);
}

void Pace::note_class(size_t index, Clock::duration took, int64_t guess_ns) {
  Class& known = classes_[index];
  const int64_t took_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(took).count();
  const int64_t ns = known.ns.load(std::memory_order_relaxed);
  const uint32_t n = known.n.load(std::memory_order_relaxed);
  note_usual(known, n, took_ns);
  if (n < kFirstReads) {
    known.n.store(n + 1, std::memory_order_relaxed);
    // A read of a peer that stood still says nothing about the next one, and must not make that wait as long.
    // Where all get slower, some dozens of reads say so.
    const int64_t floor_ns = n < kFewReads ? guess_ns : std::chrono::nanoseconds(kFloor).count();
    const int64_t base_ns = std::max(ns, floor_ns);
    if (took_ns > ns) known.ns.store(std::min(took_ns, base_ns + base_ns / 5), std::memory_order_relaxed);
    return;
  }
  // Where one of 100 is above, what 99 take off is what the one puts on.
  const int64_t moved = took_ns > ns ? ns + ns / 5 : ns - ns / 495;
  known.ns.store(std::max<int64_t>(moved, 1000), std::memory_order_relaxed);
}

// Where half of the reads are above, it goes up as often as down, however far above they are: a peer that
// stood still once is as fast as it was. The least of the first ones counts: they find everything cold.
void Pace::note_usual(Class& known, uint32_t n, int64_t took_ns) {
  const int64_t ns = known.usual_ns.load(std::memory_order_relaxed);
  const int64_t moved = took_ns > ns ? ns + ns / kPartsOfAStep : ns - ns / kPartsOfAStep;
  const int64_t least = n == 0 ? took_ns : std::min(ns, took_ns);
  known.usual_ns.store(std::max<int64_t>(n < kFewReads ? least : moved, 1000), std::memory_order_relaxed);
}

Pace::Usual Pace::usual(uint64_t nbytes) const {
  const size_t wanted = class_of(nbytes);
  const auto usual_of = [this](size_t index) {
    return classes_[index].usual_ns.load(std::memory_order_relaxed);
  };
  for (size_t away = 0; away < kClasses; ++away) {
    const size_t larger = wanted + away;
    if (larger < kClasses && has_told(larger)) return {usual_of(larger) >> away, usual_of(larger)};
    if (away >= wanted || !has_told(wanted - away)) continue;  // the class of no bytes is no size
    const int64_t ns = usual_of(wanted - away);
    return {ns, away < 20 ? ns << away : std::numeric_limits<int64_t>::max()};
  }
  return {0, 0};
}

void Pace::was_late() {
  const uint32_t n = n_late_.fetch_add(1, std::memory_order_relaxed);
  const int64_t ns = std::min(kMostSlowNs, kFirstSlowNs << std::min(n, 10u));
  slow_until_ns_.store(steady_now_ns() + ns, std::memory_order_relaxed);
}

void Pace::was_in_time() {
  if (n_late_.load(std::memory_order_relaxed) == 0) return;
  n_late_.store(0, std::memory_order_relaxed);
  slow_until_ns_.store(0, std::memory_order_relaxed);
}

bool Pace::is_slow() const {
  const int64_t until = slow_until_ns_.load(std::memory_order_relaxed);
  return until != 0 && steady_now_ns() < until;
}

}  // namespace p2pkv
