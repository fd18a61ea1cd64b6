// Random moments around the middle of something another thread does, however fast the machine is.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <thread>

namespace p2pkv::test {

using Microseconds = std::chrono::microseconds;

// Yields as well: on a busy machine the other side may be waiting for this core.
inline void spin(Microseconds time) {
  const auto until = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
}

// A window that follows the race: it grows while moments come too early, and shrinks while they come too
// late. Fixed ones suit the machine they were chosen on, and strike all on one side of the race on another.
class Moments {
 public:
  explicit Moments(uint64_t seed, Microseconds window = Microseconds(900)) : random_(seed), window_(window) {}

  // Waits until a random moment within the window.
  void await() { spin(Microseconds(random_() % static_cast<uint64_t>(window_.count()))); }

  void came_too_early() { set(window_ * 5 / 4); }
  void came_too_late() { set(window_ * 4 / 5); }

 private:
  void set(Microseconds window) { window_ = std::clamp(window, Microseconds(20), Microseconds(50'000)); }

  std::mt19937_64 random_;
  Microseconds window_;
};

}  // namespace p2pkv::test
