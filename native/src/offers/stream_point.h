// What had been queued on a CUDA stream when a call was made: done before the call's rows are touched.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "offers/row_memories.h"

namespace p2pkv::offers {

// Thread-safe.
class StreamPoint {
 public:
  // Marks it now, on every device that the rows lie on if it is a default stream, of which each has its own.
  // Null: there is nothing to wait for. What can't be marked fails the wait.
  static std::shared_ptr<StreamPoint> mark(std::optional<uint64_t> stream, const PlacedRows& placed);

  // Blocks until it is done, the deadline passes, or `gives_up` says so, which is asked every 20 ms. The
  // reason for kFailed is in `error`.
  cuda::StreamOutcome wait(const Deadline& deadline, const std::function<bool()>& gives_up,
                           std::string* error);

 private:
  cuda::StreamOutcome look(const Deadline& deadline, std::string* error);

  std::mutex mutex_;                                      // guards all below; held for one look at most
  std::vector<std::unique_ptr<cuda::StreamMark>> marks_;  // those not known to be done
  std::string failure_;
};

}  // namespace p2pkv::offers
