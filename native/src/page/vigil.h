// Whether a node has been awake so steadily that no bump can be over that it has not heard of.
//
// A bump waits for every member, until it has answered or is given up by the one that bumps. So a node that
// was awake a moment ago knows of all bumps that are over: it was asked, or nobody can have given it up
// since. One that was stopped for longer than that knows of none that was told meanwhile, when it goes on as
// well: not before it has asked another member. So it is with one that was awake and given up all the same,
// because it could not be reached, from when it hears of that.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>
#include <mutex>

namespace p2pkv {

// Nanoseconds of a clock that all processes of a machine share, and that goes on while the machine sleeps.
inline int64_t boot_now_ns() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// No node is relied on for longer, in nanoseconds. What says more is of another clock.
constexpr int64_t kLongestBelief = 60'000'000'000;

// Whether a word that a vigil shows says that it counts at this moment.
inline bool is_believed(const int64_t& until) {
  const int64_t left = __atomic_load_n(&until, __ATOMIC_SEQ_CST) - boot_now_ns();
  return left >= 0 && left <= kLongestBelief;
}

// Thread-safe.
class Vigil {
 public:
  // `believed_ns`: so long after it was awake no member gives this node up. Before it is told, it is not
  // relied on.
  void keep(int64_t believed_ns) {
    const std::lock_guard lock(mutex_);
    believed_ns_ = believed_ns;
  }

  // Says that the thread that hears of bumps is awake. That thread calls it, as often as it looks for them.
  void turned(int64_t now_ns = boot_now_ns()) {
    const std::lock_guard lock(mutex_);
    if (believed_ns_ == 0) return;
    if (turned_ns_ != 0 && now_ns - turned_ns_ > believed_ns_) ++n_sleeps_;
    turned_ns_ = now_ns;
    if (n_sleeps_ == n_caught_up_) show(shown_, now_ns + believed_ns_);
    if (n_sleeps_ == n_guests_caught_up_) show(guests_shown_, now_ns + believed_ns_);
  }

  // Says that others had given this node up though it was awake: it has missed what one that sleeps misses.
  void was_given_up() {
    const std::lock_guard lock(mutex_);
    ++n_sleeps_;
    show(shown_, 0);
    show(guests_shown_, 0);
  }

  // How often it has slept for longer, or was given up.
  uint64_t n_sleeps() const { return n_sleeps_; }
  // After this many sleeps, not fewer, another member has said what it knows, or there was none.
  void caught_up(uint64_t n_sleeps) {
    const std::lock_guard lock(mutex_);
    n_caught_up_ = n_sleeps;
  }

  // After this many sleeps, not fewer, the sources of all guests here have said what they have taken back.
  void guests_caught_up(uint64_t n_sleeps) {
    const std::lock_guard lock(mutex_);
    n_guests_caught_up_ = n_sleeps;
  }

  // Has this word of shared memory say until when what this node knows is all there is to know, as time of
  // `boot_now_ns`, and `guests` until when it has no guest that its source has taken back. Null ends that:
  // nothing is relied on any more, and the words are not written to when this returns.
  void show_in(int64_t* word, int64_t* guests = nullptr) {
    const std::lock_guard lock(mutex_);
    show(shown_, 0);
    show(guests_shown_, 0);
    shown_ = word;
    guests_shown_ = guests;
  }

 private:
  // After all that was heard before: who sees this sees what `NamespaceEpochs` shows of that.
  static void show(int64_t* word, int64_t until_ns) {
    if (word != nullptr) __atomic_store_n(word, until_ns, __ATOMIC_SEQ_CST);
  }

  std::mutex mutex_;  // guards all below, but that `n_sleeps_` is read without it
  int64_t believed_ns_ = 0;
  int64_t turned_ns_ = 0;
  std::atomic<uint64_t> n_sleeps_{0};
  uint64_t n_caught_up_ = 0;
  uint64_t n_guests_caught_up_ = 0;
  int64_t* shown_ = nullptr;
  int64_t* guests_shown_ = nullptr;
};

}  // namespace p2pkv
