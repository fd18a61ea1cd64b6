#include "page/prefault.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "base/clock.h"
#include "base/thread.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace p2pkv {
namespace {

// A thread's part of a round: 8 ms of clearing, beside which starting a thread is nothing.
constexpr size_t kPart = size_t{16} << 20;
// Zeroing is bound by memory long before a large machine runs out of processors.
constexpr unsigned kMostThreads = 32;
// Twice the threads must be worth a tenth, or they only take processors from others.
constexpr double kWorthIt = 1.1;

unsigned processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return static_cast<unsigned>(std::max(1, CPU_COUNT(&set)));
}

// Whether the kernel touches memory when asked to, as it does from 5.14 on.
bool can_populate() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return true;  // then it says itself what is wrong
  const bool can = madvise(memory, page, MADV_POPULATE_WRITE) == 0 || errno != EINVAL;
  munmap(memory, page);
  return can;
}

int touch(uint8_t* base, size_t nbytes) {
  static const bool kCanPopulate = can_populate();
  if (!kCanPopulate) {
    touch_by_writing(base, nbytes);
    return 0;
  }
  while (madvise(base, nbytes, MADV_POPULATE_WRITE) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

// Touches the parts of `[base, base + nbytes)` at once, one a thread; returns 0 or an errno.
int touch_at_once(uint8_t* base, size_t nbytes, unsigned n_threads) {
  const size_t part = (nbytes / n_threads + kPart - 1) / kPart * kPart;
  std::vector<int> errors(n_threads, 0);
  {
    std::vector<NamedThread> threads(n_threads);
    for (unsigned i = 1; i < n_threads; ++i) {
      const size_t from = std::min(nbytes, i * part);
      const size_t length = std::min(part, nbytes - from);
      const auto body = [&errors, i, base, from, length] { errors[i] = touch(base + from, length); };
      // without a thread it is done here, if later
      if (length != 0 && !threads[i].start("p2pkv-prefault", body)) body();
    }
    errors[0] = touch(base, std::min(part, nbytes));
  }
  const auto failed = std::find_if(errors.begin(), errors.end(), [](int error) { return error != 0; });
  return failed == errors.end() ? 0 : *failed;
}

}  // namespace

void touch_by_writing(uint8_t* base, size_t nbytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (size_t at = 0; at < nbytes; at += page) __atomic_fetch_or(base + at, uint8_t{0}, __ATOMIC_RELAXED);
}

bool prefault_writable(uint8_t* base, size_t nbytes, const std::atomic<bool>& stop, unsigned most_threads) {
  const unsigned most = std::min(kMostThreads, most_threads != 0 ? most_threads : processors());
  unsigned n_threads = 1;
  bool is_growing = true;
  double best = 0;  // bytes a nanosecond
  for (size_t at = 0; at < nbytes && !stop.load(std::memory_order_relaxed);) {
    const size_t round = std::min(nbytes - at, n_threads * kPart);
    const int64_t began = steady_now_ns();
    if (const int error = touch_at_once(base + at, round, n_threads); error != 0) {
      errno = error;
      return false;
    }
    at += round;
    if (!is_growing) continue;
    const double rate =
        static_cast<double>(round) / static_cast<double>(std::max<int64_t>(1, steady_now_ns() - began));
    if (n_threads > 1 && rate < best * kWorthIt) {
      n_threads /= 2;
      is_growing = false;
    } else {
      best = rate;
      is_growing = n_threads * 2 <= most;
      if (is_growing) n_threads *= 2;
    }
  }
  return true;
}

}  // namespace p2pkv
