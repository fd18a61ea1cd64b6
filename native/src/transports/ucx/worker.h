// One UCX worker and the thread that alone may touch it.
//
// UCX calls back from within its progress function, and closing an endpoint needs progress too. So everything
// that happens to a worker happens on its thread: others hand it tasks. The thread polls for a moment after
// the last event and then sleeps on descriptors: polling alone would take a core from the engine.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "api.h"
#include "p2pkv/fd.h"
#include "p2pkv/thread.h"

namespace p2pkv::ucx {

// Settings of UCX by their names without UCX_.
using Settings = std::vector<std::pair<std::string, std::string>>;

// What UCX says of a context with these settings; empty, with the reason in `error`, if it can't make one.
std::string describe_context(const Settings& settings, std::string* error);

// One message on its way: keeps frame and payload until UCX has let go of them.
struct Message {
  virtual ~Message() = default;
  // On the worker's thread, once, whether it was sent or not; the message is destroyed afterwards.
  virtual void settled(ucs_status_t status) {}

  const void* frame = nullptr;
  size_t frame_nbytes = 0;
  const void* payload = nullptr;  // or of ucp_dt_iov_t if n_pieces is not 0
  size_t payload_nbytes = 0;
  size_t n_pieces = 0;
  class Worker* sender = nullptr;  // set by send()
};

class Worker {
 public:
  // What the owner of a worker does on its thread.
  struct Hooks {
    std::function<bool()> turn;  // after each round of progress; true if it did something
    std::function<void()> tick;  // about once a second while `is_watchful` says so
    std::function<bool()> is_watchful;
    std::function<void()> last;  // before the worker is destroyed: closes endpoints and listeners
  };
  using Receive = std::function<void(std::string_view frame, std::string_view payload, ucp_ep_h from)>;

  // Null, with the reason in `error`. Nothing runs before run() is called.
  static std::unique_ptr<Worker> make(const Settings& settings, std::string* error);
  ~Worker() { close(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Before run().
  void on_message(unsigned kind, Receive receive);
  bool run(const char* thread_name, Hooks hooks, std::string* error);

  // Runs `task` on the thread, soon; drops it once closing. From any thread, holding any lock.
  void post(std::function<void()> task);
  // Ends the thread; waits for everything UCX still holds. Idempotent.
  void close();

  // The following on the worker's thread only.

  ucp_worker_h get() const { return worker_; }
  void send(ucp_ep_h endpoint, unsigned kind, std::unique_ptr<Message> message, bool wants_reply = false);
  // Releases the endpoint without asking the peer; what is under way on it settles soon, as canceled.
  void close_endpoint(ucp_ep_h endpoint);

 private:
  struct Handler {
    Worker* worker;
    Receive receive;
  };
  using Clock = std::chrono::steady_clock;

  Worker() = default;
  static ucs_status_t receive(void* handler, const void* header, size_t header_length, void* data,
                              size_t length, const ucp_am_recv_param_t* param);
  static void sent(void* request, ucs_status_t status, void* message);
  void loop();
  bool run_tasks();
  bool reap_closed();
  void sleep();
  void finish();

  const pid_t pid_ = getpid();
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int worker_fd_ = -1;
  std::vector<std::unique_ptr<Handler>> handlers_;
  Hooks hooks_;
  std::vector<void*> closing_;  // requests of endpoints that are being closed
  size_t n_unsent_ = 0;         // messages that UCX holds
  Clock::time_point next_tick_{};
  Wakeup wakeup_;
  std::mutex mutex_;  // guards tasks_ and is_closing_
  std::vector<std::function<void()>> tasks_;
  bool is_closing_ = false;
  std::mutex ending_;  // held by the one close() that does the work
  NamedThread thread_;
};

}  // namespace p2pkv::ucx
