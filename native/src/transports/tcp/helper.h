// A thread that drives one stream beside the caller's.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>

#include "base/fd.h"
#include "base/thread.h"

namespace p2pkv::tcp {

class Helper {
 public:
  ~Helper() { close(); }
  bool start();
  void close();
  // The task before must have ended.
  void give(std::function<void()> task);
  // Asks the task under way to end soon: it polls called_off_fd() beside what it waits for.
  void call_off();
  bool is_called_off() const { return is_called_off_; }
  int called_off_fd() const { return called_off_.fd(); }

 private:
  void run();

  std::mutex mutex_;  // guards all below
  std::condition_variable given_;
  std::function<void()> task_;
  bool is_closing_ = false;
  const Wakeup called_off_;
  std::atomic<bool> is_called_off_{false};
  NamedThread thread_;
};

}  // namespace p2pkv::tcp
