// One reader, as the owner serves it: sends what it asks for, and vouches for the words.
//
// What makes a word come after its bytes: it is loaded when the stream has done everything up to the
// request's sends, behind a fence. Then NCCL has read the last of those bytes, whether they have left this
// machine or not. The region can't be closed before; a close that finds a send under way ends the session,
// since nobody can say when a reader takes what is sent to it.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "net/sealed_stream.h"
#include "transports/nccl/line.h"
#include "transports/registered.h"

namespace p2pkv::nccl {

class Session {
 public:
  Session(SealedStream stream, Means* means, std::shared_ptr<RegionTable> regions)
      : stream_(std::move(stream)), means_(means), regions_(std::move(regions)) {}

  // Until the reader hangs up, misbehaves or takes nothing for long, or stop() is called.
  void serve();
  // From any thread.
  void stop();

 private:
  using Clock = Deadline::Clock;

  struct Request {
    uint64_t id = 0;
    std::shared_ptr<RegisteredRegion> region;  // null: gone, or never was
    std::vector<SpanRequest> spans;
    uint64_t nbytes = 0;
    std::unique_ptr<RegisteredRegion::Use> use;  // from its send until its verdict
    bool is_begun = false;
    std::unique_ptr<cuda::StreamMark> mark;
    Clock::time_point since;  // it was begun
  };

  bool meet();
  bool turn();
  bool exchange();
  bool take_ask(std::string_view message);
  bool is_valid(Request& request) const;
  bool send();
  bool begin(Request& request);
  bool answer();
  bool is_stuck() const;
  void say_verdict(Request& request);
  void rest();

  SealedStream stream_;
  Means* const means_;
  const std::shared_ptr<RegionTable> regions_;
  Wakeup wakeup_;
  std::atomic<bool> is_stopping_ = false;
  std::unique_ptr<Communicator> comm_;
  std::deque<Request> requests_;
  Request* queueing_ = nullptr;
  std::chrono::microseconds nap_{};
};

}  // namespace p2pkv::nccl
