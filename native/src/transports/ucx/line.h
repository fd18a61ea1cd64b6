// A reader's connection to one owner: its own UCX worker, driven by whichever thread has the endpoint's
// batch.
//
// A worker of its own, because then the thread that waits moves the bytes, nothing has to be handed from
// thread to thread, and destroying it ends for certain whatever the owner may still send.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "transports/ucx/frames.h"
#include "transports/ucx/port.h"

namespace p2pkv::ucx {

// A request of a batch, ready to be sent.
struct Ask {
  AskFrame frame;
  std::vector<SpanRequest> spans;
};

// Who takes what an owner sends. False: no owner of ours could have sent it.
class Arrivals {
 public:
  virtual bool take_bytes(const BytesFrame& frame, std::string_view bytes) = 0;
  virtual bool take_end(const EndFrame& frame, std::string_view words) = 0;

 protected:
  ~Arrivals() = default;
};

// Used by one thread at a time, but for wake().
class Line {
 public:
  // Starts to connect to the owner's worker; never blocks on it. Null, with the reason in `error`.
  static std::unique_ptr<Line> open(std::shared_ptr<Context> context, std::string_view owner,
                                    const Token& token, std::string* error);
  ~Line();

  // For as long as it lives, what arrives goes to `arrivals`.
  class Listening {
   public:
    Listening(Line& line, Arrivals* arrivals) : line_(line) { line_.arrivals_ = arrivals; }
    ~Listening() { line_.arrivals_ = nullptr; }
    Listening(const Listening&) = delete;
    Listening& operator=(const Listening&) = delete;

   private:
    Line& line_;
  };
  void send(Ask ask);
  // Handles what has come; true if there was anything.
  bool progress() { return port_->progress(); }
  // Returns when there may be something to do, soon after wake(), or at the deadline.
  void sleep(const Deadline& deadline);
  void wake() const { wakeup_.set(); }
  bool is_lost() const { return is_lost_; }

 private:
  Line();
  template <typename Frame, typename Take>
  void arrived(std::string_view bytes, Take take);

  const uint64_t reader_;
  Wakeup wakeup_;
  std::unique_ptr<Port> port_;
  ucp_ep_h endpoint_ = nullptr;
  Arrivals* arrivals_ = nullptr;
  bool is_lost_ = false;
};

}  // namespace p2pkv::ucx
