// A thread that drives one stream beside the caller's.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>

#include "base/thread.h"

namespace p2pkv::tcp {

class Helper {
 public:
  ~Helper() { close(); }
  bool start();
  void close();
  // The task before must have ended.
  void give(std::function<void()> task);

 private:
  void run();

  std::mutex mutex_;  // guards all below
  std::condition_variable given_;
  std::function<void()> task_;
  bool is_closing_ = false;
  NamedThread thread_;
};

}  // namespace p2pkv::tcp
