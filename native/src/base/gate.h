// Lets something close while calls are under way: no call enters afterwards, and what they use goes when the
// last has left.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace p2pkv {

// Thread-safe. Entering and leaving allocate nothing once a few threads have been inside at a time.
class Gate {
 public:
  // False once it is shut.
  bool enter();
  // True if this was the last call of a shut gate, and somebody asked in `drain` to be told so.
  bool leave();

  // Refuses new calls; false if it was shut already.
  bool shut();
  // Blocks until no other thread is inside. False if the calling thread is, in a call that a signal's handler
  // has interrupted: then the `leave` of that call returns true.
  bool drain();

 private:
  std::mutex mutex_;  // guards all below
  std::condition_variable left_;
  std::vector<std::thread::id> inside_;  // once for each call
  bool is_shut_ = false;
  bool is_awaited_ = false;
};

}  // namespace p2pkv
