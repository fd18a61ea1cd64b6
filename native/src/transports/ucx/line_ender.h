// Ends connections on a thread of its own: UCX may take seconds to let go of one whose peer is gone, and the
// call that gives it up has a deadline.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "base/thread.h"
#include "transports/ucx/line.h"

namespace p2pkv::ucx {

// Thread-safe.
class LineEnder {
 public:
  ~LineEnder() { close(); }
  // False, with the reason in `error`, without a thread to give.
  bool start(std::string* error);
  // Ends `line` soon; at once once closed.
  void take(ThreadOwner<Line> line);
  // Returns when all that was taken has ended. Idempotent.
  void close();

 private:
  void loop();

  std::mutex mutex_;  // guards all below, but for the joining of thread_
  std::condition_variable changed_;
  std::vector<ThreadOwner<Line>> lines_;
  bool is_closing_ = false;
  NamedThread thread_;
};

}  // namespace p2pkv::ucx
