#include "base/copy_team.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace p2pkv {
namespace {

// One thread takes so much at a time: 10 to 40 us of copying, beside which taking it is nothing. One waits
// for the other no longer than that at the end, where both have a core.
constexpr uint64_t kShareBytes = 128 << 10;

// Each so many batches the way that seems slower is tried again.
constexpr uint32_t kTrialEvery = 32;
// A second thread takes a core from others: it must be worth that.
constexpr double kWorthIt = 0.9;
// How much of what is known a new measurement replaces.
constexpr double kNews = 0.25;

std::mutex hiring;              // no fork finds it locked
std::weak_ptr<CopyTeam> hired;  // guarded by hiring
std::atomic<bool> is_hired{false};
std::atomic<bool> is_always_shared{false};

std::atomic<uint64_t> n_alone{0};
std::atomic<uint64_t> n_shared{0};

// Whether this process may run on two cores; the machine may have more.
bool has_two_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  // it fails where there are more than a thousand
  return sched_getaffinity(0, sizeof cores, &cores) != 0 || CPU_COUNT(&cores) > 1;
}

// How many copies make a share.
size_t share_of(const Copies& copies) {
  return static_cast<size_t>(
      std::max<uint64_t>(1, kShareBytes * copies.n / std::max<uint64_t>(copies.nbytes, 1)));
}

size_t make_alone(const Copies& copies, const std::function<bool()>& is_over) {
  const size_t share = share_of(copies);
  for (size_t i = 0; i < copies.n;) {
    if (i > 0 && is_over()) return i;
    for (const size_t end = i + std::min(share, copies.n - i); i < end; ++i) copies.make(i);
  }
  return copies.n;
}

}  // namespace

TwoWays::Way TwoWays::next() {
  for (const Way way : {kAlone, kShared}) {
    if (ns_per_byte_[way] == 0) return way;
  }
  const Way better = ns_per_byte_[kShared] < kWorthIt * ns_per_byte_[kAlone] ? kShared : kAlone;
  const Way worse = better == kShared ? kAlone : kShared;
  return ++n_ % kTrialEvery == 0 ? worse : better;
}

void TwoWays::took(Way way, double ns_per_byte) {
  double& known = ns_per_byte_[way];
  known = known == 0 ? ns_per_byte : known + kNews * (ns_per_byte - known);
}

// Copies that two threads take shares of, from the front.
struct CopyTeam::Job {
  const Copies& copies;
  const size_t share;
  std::atomic<size_t> next{0};
  size_t n_helped = 0;  // by the helper, which writes it before it says that it is done

  // Makes shares until there is none, or `is_over`; returns how many copies that were.
  template <typename IsOver>
  size_t work(const IsOver& is_over) {
    size_t n = 0;
    for (;;) {
      size_t i = next.fetch_add(share, std::memory_order_relaxed);
      if (i >= copies.n) return n;
      const size_t end = i + std::min(share, copies.n - i);
      n += end - i;
      for (; i < end; ++i) copies.make(i);
      if (is_over()) return n;
    }
  }

  // Nobody takes another share; returns how many copies were taken.
  size_t stop() { return std::min(next.exchange(copies.n, std::memory_order_relaxed), copies.n); }
};

std::shared_ptr<CopyTeam> CopyTeam::hire(Zeal zeal) {
  static const int at_fork =
      pthread_atfork([] { hiring.lock(); }, [] { hiring.unlock(); }, [] { hiring.unlock(); });
  const std::lock_guard lock(hiring);
  std::shared_ptr<CopyTeam> team = hired.lock();
  if (zeal == Zeal::kAlways) is_always_shared = true;
  if (team && team->pid_ == getpid()) return team;
  if (at_fork != 0 || !has_two_cores()) return nullptr;
  team = std::shared_ptr<CopyTeam>(new CopyTeam, DeleteUnlessForked<CopyTeam>{});
  if (!team->helper_.start("p2pkv-copies", [self = team.get()] { self->help(); })) return nullptr;
  hired = team;
  is_hired = true;
  return team;
}

std::shared_ptr<CopyTeam> CopyTeam::current() {
  if (!is_hired.load(std::memory_order_relaxed)) return nullptr;
  const std::lock_guard lock(hiring);
  std::shared_ptr<CopyTeam> team = hired.lock();
  return team && team->pid_ == getpid() ? team : nullptr;
}

CopyTeam::~CopyTeam() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  helper_.join();
  is_always_shared = false;
}

void CopyTeam::help() {
  // So that it does not take a core from a thread that runs: it begins where one is idle. It keeps its share
  // of the time, or who waits for it would wait for long. Without it the helper only is less polite.
  const sched_param param{};
  sched_setscheduler(0, SCHED_BATCH, &param);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return job_ != nullptr || is_closing_; });
    if (is_closing_) return;
    Job* const job = std::exchange(job_, nullptr);
    is_helping_ = true;
    lock.unlock();
    job->n_helped = job->work([] { return false; });
    lock.lock();
    is_helping_ = false;
    changed_.notify_all();
  }
}

size_t CopyTeam::share(const Copies& copies, const std::function<bool()>& is_over, size_t* n_helped) {
  Job job{copies, share_of(copies)};
  {
    const std::lock_guard lock(mutex_);
    job_ = &job;
  }
  changed_.notify_all();
  job.work(is_over);
  const size_t n_made = job.stop();
  std::unique_lock lock(mutex_);
  job_ = nullptr;
  changed_.wait(lock, [this] { return !is_helping_; });
  if (n_helped != nullptr) *n_helped = job.n_helped;
  return n_made;
}

size_t CopyTeam::make(const Copies& copies, const std::function<bool()>& is_over) {
  const std::unique_lock lent(lent_, std::try_to_lock);
  if (!lent.owns_lock()) {
    ++n_alone;
    return make_alone(copies, is_over);
  }
  const TwoWays::Way way = is_always_shared ? TwoWays::kShared : ways_.next();
  const int64_t begin = steady_now_ns();
  const size_t n_made = way == TwoWays::kShared ? share(copies, is_over) : make_alone(copies, is_over);
  // one that was cut short says nothing: how many bytes it copied is not known
  if (n_made == copies.n) {
    ways_.took(way, static_cast<double>(steady_now_ns() - begin) / static_cast<double>(copies.nbytes));
  }
  ++(way == TwoWays::kShared ? n_shared : n_alone);
  return n_made;
}

size_t make_copies(const Copies& copies, const std::function<bool()>& is_over) {
  const bool is_large = copies.nbytes >= CopyTeam::kLeastShared || is_always_shared;
  if (!is_large || copies.n < 2) return make_alone(copies, is_over);
  const std::shared_ptr<CopyTeam> team = CopyTeam::current();
  if (team) return team->make(copies, is_over);
  ++n_alone;
  return make_alone(copies, is_over);
}

LargeCopies large_copies() {
  return {n_alone, n_shared};
}

}  // namespace p2pkv
