// Threads of the native core: named, deaf to signals, and harmless in a forked child.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

namespace p2pkv {

class NamedThread {
 public:
  NamedThread() = default;
  NamedThread(NamedThread&&) = default;
  NamedThread& operator=(NamedThread&& other) noexcept {
    join();
    thread_ = std::move(other.thread_);
    pid_ = other.pid_;
    return *this;
  }
  ~NamedThread() { join(); }

  // `name` has at most 15 characters. False when the system has no thread to give.
  bool start(const char* name, std::function<void()> body) {
    // Signals belong to the interpreter's main thread: one delivered here would not interrupt its system
    // call.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool is_started = true;
    try {
      thread_ = std::thread(std::move(body));
      pthread_setname_np(thread_.native_handle(), name);
      pid_ = getpid();
    } catch (const std::system_error&) {
      is_started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return is_started;
  }

  // Runs `body` in a thread that nobody waits for. False, and not run, when the system has none to give.
  static bool run_behind(const char* name, std::function<void()> body) {
    NamedThread thread;
    if (!thread.start(name, std::move(body))) return false;
    thread.thread_.detach();
    return true;
  }

  // Waits for the thread to end. In a forked child, where it does not exist, only forgets it.
  void join() {
    if (!thread_.joinable()) return;
    if (getpid() == pid_) {
      thread_.join();
    } else {
      thread_.detach();
    }
  }

 private:
  std::thread thread_;
  pid_t pid_ = 0;
};

// Owns an object that has threads. In a forked child it leaks it: the threads are not there to be joined, and
// destroying a condition variable they were waiting on would wait for them for ever.
template <typename T>
struct DeleteUnlessForked {
  pid_t pid = getpid();
  void operator()(T* object) const {
    if (getpid() == pid) delete object;
  }
};
template <typename T>
using ThreadOwner = std::unique_ptr<T, DeleteUnlessForked<T>>;

}  // namespace p2pkv
