// The thread of an owner's port: answers readers whatever the interpreter does.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/thread.h"
#include "transports/ucx/port.h"

namespace p2pkv::ucx {

// It polls for kSpin after the last event and then sleeps: polling alone would take a core from the engine.
constexpr std::chrono::microseconds kSpin{20};

// Everything that happens to the port happens on this thread: others hand it tasks.
class Worker {
 public:
  struct Hooks {
    std::function<bool()> turn;         // after each round of progress; true if it did something
    std::function<void()> tick;         // about once a second while `is_watchful` says so
    std::function<bool()> is_watchful;  // asked before sleeping
    std::function<void()> end;          // when the thread has ended, for last messages
  };

  // Takes the port over; its handlers have been set.
  Worker(std::unique_ptr<Port> port, Hooks hooks) : port_(std::move(port)), hooks_(std::move(hooks)) {}
  ~Worker() { close(); }
  bool start(const char* name, std::string* error);
  // Ends the thread and destroys the port, within which messages still settle. Idempotent.
  void close();

  // Runs `task` on the thread, soon; drops it once closing. From any thread, holding any lock.
  void post(std::function<void()> task);
  // On the thread only.
  Port& port() { return *port_; }

 private:
  using Clock = std::chrono::steady_clock;
  void loop();
  bool run_tasks();

  const pid_t pid_ = getpid();
  std::unique_ptr<Port> port_;
  const Hooks hooks_;
  Clock::time_point next_tick_{};
  Wakeup wakeup_;
  std::mutex mutex_;  // guards tasks_ and is_closing_
  std::vector<std::function<void()>> tasks_;
  bool is_closing_ = false;
  std::mutex ending_;  // held by the one close() that does the work
  NamedThread thread_;
};

}  // namespace p2pkv::ucx
