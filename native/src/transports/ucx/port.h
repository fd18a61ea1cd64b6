// One UCX worker: sends and takes messages, opens and closes endpoints. Used by one thread at a time.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transports/ucx/context.h"

namespace p2pkv::ucx {

// One message on its way: keeps frame and payload until UCX has let go of them.
struct Message {
  virtual ~Message() = default;
  // Once, whether it was sent or not; the message is destroyed afterwards.
  virtual void settled(ucs_status_t status) {}

  const void* frame = nullptr;
  size_t frame_nbytes = 0;
  const void* payload = nullptr;  // or of ucp_dt_iov_t if n_pieces is not 0
  size_t payload_nbytes = 0;
  size_t n_pieces = 0;
  class Port* sender = nullptr;  // set by send()
};

class Port {
 public:
  using Receive = std::function<void(std::string_view frame, std::string_view payload, ucp_ep_h from)>;
  // Told of an endpoint that is lost, from within progress(), where it can't be closed.
  using Lost = std::function<void(ucp_ep_h endpoint)>;

  // Null, with the reason in `error`.
  static std::unique_ptr<Port> make(std::shared_ptr<Context> context, Lost lost, std::string* error);
  // Closes every endpoint and waits until UCX has let go of every message; that takes no peer.
  ~Port();
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;

  // What a peer connects to.
  std::string address() const;
  void on_message(unsigned kind, Receive receive);

  // Does not block on the peer. Null if the address is of no use.
  ucp_ep_h connect(std::string_view address);
  // Releases the endpoint without asking the peer; what is under way on it settles soon, as canceled.
  void close(ucp_ep_h endpoint);
  // Within a handler, `endpoint` may also be where a message that wanted a reply came from.
  void send(ucp_ep_h endpoint, unsigned kind, std::unique_ptr<Message> message, bool wants_reply = false);

  // Returns when every peer has what was sent to it, or after `seconds`: closing an endpoint drops what has
  // not left.
  void flush(double seconds);

  // Handles what has happened; true if there was anything.
  bool progress();
  // Blocks until there may be something to do here, `fd` is readable, or `timeout_ms` have passed (-1: none).
  void sleep(int fd, int timeout_ms);

 private:
  struct Handler {
    Port* port;
    Receive receive;
  };

  Port(std::shared_ptr<Context> context, Lost lost) : context_(std::move(context)), lost_(std::move(lost)) {}
  static ucs_status_t receive(void* handler, const void* header, size_t header_length, void* data,
                              size_t length, const ucp_am_recv_param_t* param);
  static void sent(void* request, ucs_status_t status, void* message);
  static void failed(void* port, ucp_ep_h endpoint, ucs_status_t status);
  bool reap_closed();

  const std::shared_ptr<Context> context_;
  const Lost lost_;
  ucp_worker_h worker_ = nullptr;
  int worker_fd_ = -1;
  std::vector<std::unique_ptr<Handler>> handlers_;
  std::vector<ucp_ep_h> endpoints_;  // made by connect() and not closed yet
  std::vector<void*> closing_;       // requests of endpoints that are being closed
  size_t n_unsent_ = 0;              // messages that UCX holds
  bool is_ending_ = false;           // nobody is told anything any more, but that messages have settled
};

}  // namespace p2pkv::ucx
