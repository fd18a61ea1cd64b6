// A mutex whose holder can let others in between the parts of a long piece of work.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

namespace p2pkv {

// Lockable. A plain mutex given back and taken again at once is taken by the same thread again: those that
// wait need 50 us to wake up. So `let_in` waits until one of them has had it.
class PoliteMutex {
 public:
  void lock() {
    if (mutex_.try_lock()) return;
    ++n_waiting_;
    mutex_.lock();
    --n_waiting_;
    ++n_let_in_;
  }
  void unlock() { mutex_.unlock(); }

  // Called by the holder, who has it again afterwards. Does nothing where nobody waits.
  void let_in() {
    if (n_waiting_ == 0) return;
    const uint64_t before = n_let_in_;
    mutex_.unlock();
    // Bounded, because one that waits may have no processor to wake up on.
    for (int i = 0; i < kMostSleeps && n_waiting_ > 0 && n_let_in_ == before; ++i)
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    lock();
  }

 private:
  static constexpr int kMostSleeps = 20;
  std::mutex mutex_;
  std::atomic<uint32_t> n_waiting_{0};
  std::atomic<uint64_t> n_let_in_{0};
};

}  // namespace p2pkv
