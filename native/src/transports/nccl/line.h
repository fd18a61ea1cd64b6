// A reader's way to one owner: the stream over which it asks, and the communicator over which bytes come.
// All endpoints of a transport that lead to the same owner share it, for a communicator takes seconds to make
// and memory of the device to keep.
//
// Its thread alone uses the stream and the communicator. Requests are asked for in turns, a few at a time,
// and NCCL brings their bytes in the order in which the owner says that it sends them, which is the order in
// which they are received here.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/thread.h"
#include "cuda/staging.h"
#include "net/sealed_stream.h"
#include "transports/nccl/budget.h"
#include "transports/nccl/communicator.h"
#include "transports/nccl/intake.h"

namespace p2pkv::nccl {

// What every line and every session of a transport is made with; outlives them.
struct Means {
  std::shared_ptr<cuda::Device> device;
  CommOptions options;
  Budget budget;
};

class Line {
 public:
  // Begins to connect to the owner behind `door`, a DoorBlob. Null, with the reason in `error`.
  static std::shared_ptr<Line> open(Means* means, std::string_view door, std::string* error);
  ~Line() { close(); }
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  // Keeps it from ending for want of use until detach(). False once it has ended.
  bool attach();
  void detach();
  // Asks for all of an intake's requests; it is lost at once if the line has ended.
  void post(std::shared_ptr<Intake> intake);
  // Has the thread look at what has been closed.
  void wake();
  // Whether NCCL has let go of everything, so that close() would return at once.
  bool is_over() const { return is_over_; }
  // Returns when NCCL has let go of everything. Idempotent.
  void close();

 private:
  using Clock = Deadline::Clock;

  // What an intake still has to ask for.
  struct Job {
    std::shared_ptr<Intake> intake;
    size_t next = 0;
  };
  // A request under way.
  struct Asked {
    std::shared_ptr<Intake> intake;
    size_t request = 0;
    std::vector<uint64_t> lengths;  // of its spans
    uint64_t nbytes = 0;
    bool is_coming = false;  // the owner sends it
    bool is_queued = false;  // and NCCL has been told to receive it
    std::unique_ptr<cuda::StreamMark> mark;
    bool is_received = false;
    std::optional<VerdictFrame> verdict;
    std::string words;
  };

  explicit Line(Means* means) : means_(means) {}
  void run();
  bool meet();
  bool serve();
  bool exchange();
  bool take_message(std::string_view message);
  bool take_welcome(const WelcomeFrame& frame);
  bool take_go(const GoFrame& frame);
  bool take_verdict(const VerdictFrame& frame, std::string_view words);
  Asked* find(uint64_t id);
  void take_posted();
  void ask();
  bool receive();
  bool receive_into_place(uint64_t id, Asked& asked);
  bool land();
  bool is_held_up();
  bool is_unused();
  void rest(bool is_device_busy);
  void end();

  Means* const means_;
  Wakeup wakeup_;
  std::atomic<bool> is_stopping_ = false;
  std::atomic<bool> is_over_ = false;
  std::mutex mutex_;  // guards the four below, and the end of wakeup_
  std::vector<std::shared_ptr<Intake>> posted_;
  int n_users_ = 0;
  Clock::time_point unused_since_ = Clock::now();
  bool has_ended_ = false;
  // All below: the thread's alone, once it has started.
  std::unique_ptr<Budget::Share> share_;
  std::shared_ptr<cuda::Staging> staging_;
  cuda::Staging::Loan places_;  // where requests are received, in turns
  std::unique_ptr<SealedStream> stream_;
  std::unique_ptr<Communicator> comm_;
  std::deque<Job> jobs_;
  std::deque<Asked> asked_;
  uint64_t first_id_ = 0;  // of the front of asked_
  Asked* queueing_ = nullptr;
  std::optional<Clock::time_point> held_up_since_;
  std::chrono::microseconds nap_{};
  std::mutex closing_;  // held by the one close() that joins
  NamedThread thread_;
};

}  // namespace p2pkv::nccl
