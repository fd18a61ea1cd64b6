#include "transports/ucx/port.h"

#include <poll.h>

#include <algorithm>

#include "base/clock.h"

namespace p2pkv::ucx {
namespace {

// Calls of UCX's progress before the caller looks at other things again.
constexpr int kRounds = 16;
// What the end waits for UCX to let go of endpoints and messages.
constexpr double kFinishSeconds = 5.0;

}  // namespace

std::unique_ptr<Port> Port::make(std::shared_ptr<Context> context, Lost lost, std::string* error) {
  const Api& api = Api::get();
  auto port = std::unique_ptr<Port>(new Port(std::move(context), std::move(lost)));
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  ucs_status_t status = api.worker_create(port->context_->get(), &params, &port->worker_);
  if (status == UCS_OK) status = api.worker_get_efd(port->worker_, &port->worker_fd_);
  if (status == UCS_OK) return port;
  *error = std::string("cannot make a UCX worker: ") + api.status_string(status);
  return nullptr;
}

Port::~Port() {
  if (worker_ == nullptr) return;
  is_ending_ = true;
  for (const ucp_ep_h endpoint : std::vector<ucp_ep_h>(endpoints_)) close(endpoint);
  const Deadline deadline = Deadline::after(kFinishSeconds);
  while ((!closing_.empty() || n_unsent_ > 0) && !deadline.passed()) progress();
  Api::get().worker_destroy(worker_);
}

std::string Port::address() const {
  const Api& api = Api::get();
  ucp_address_t* address = nullptr;
  size_t nbytes = 0;
  if (api.worker_get_address(worker_, &address, &nbytes) != UCS_OK) return {};
  const std::string copy(reinterpret_cast<const char*>(address), nbytes);
  api.worker_release_address(worker_, address);
  return copy;
}

void Port::on_message(unsigned kind, Receive receive) {
  handlers_.push_back(std::make_unique<Handler>(Handler{this, std::move(receive)}));
  ucp_am_handler_param_t param{};
  param.field_mask =
      UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  param.id = kind;
  param.cb = &Port::receive;
  param.arg = handlers_.back().get();
  Api::get().worker_set_am_recv_handler(worker_, &param);
}

ucs_status_t Port::receive(void* handler, const void* header, size_t header_length, void* data, size_t length,
                           const ucp_am_recv_param_t* param) {
  auto& self = *static_cast<Handler*>(handler);
  // A rendezvous is nothing that this transport sends: its data is let lie.
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 || self.port->is_ending_) return UCS_OK;
  const bool has_reply = (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0;
  self.receive({static_cast<const char*>(header), header_length}, {static_cast<const char*>(data), length},
               has_reply ? param->reply_ep : nullptr);
  return UCS_OK;
}

ucp_ep_h Port::connect(std::string_view address) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLER |
                      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {&Port::failed, this};
  ucp_ep_h endpoint = nullptr;
  if (Api::get().ep_create(worker_, &params, &endpoint) != UCS_OK) return nullptr;
  endpoints_.push_back(endpoint);
  return endpoint;
}

void Port::failed(void* port, ucp_ep_h endpoint, ucs_status_t) {
  auto* self = static_cast<Port*>(port);
  if (!self->is_ending_) self->lost_(endpoint);
}

void Port::close(ucp_ep_h endpoint) {
  if (std::erase(endpoints_, endpoint) == 0) return;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t request = Api::get().ep_close_nbx(endpoint, &param);
  if (UCS_PTR_IS_PTR(request)) closing_.push_back(request);
}

void Port::send(ucp_ep_h endpoint, unsigned kind, std::unique_ptr<Message> message, bool wants_reply) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
                       UCP_OP_ATTR_FIELD_DATATYPE;
  // Never a rendezvous: it would let the peer write to memory, and wait for it.
  param.flags = UCP_AM_SEND_FLAG_EAGER | (wants_reply ? UCP_AM_SEND_FLAG_REPLY : 0);
  param.cb.send = &Port::sent;
  message->sender = this;
  param.user_data = message.get();
  const bool is_gathered = message->n_pieces > 0;
  param.datatype = is_gathered ? ucp_dt_make_iov() : ucp_dt_make_contig(1);
  const size_t count = is_gathered ? message->n_pieces : message->payload_nbytes;
  const ucs_status_ptr_t request = Api::get().am_send_nbx(
      endpoint, kind, message->frame, message->frame_nbytes, message->payload, count, &param);
  if (UCS_PTR_IS_PTR(request)) {
    ++n_unsent_;
    message.release();  // comes back in sent(), from within progress
  } else {
    message->settled(UCS_PTR_STATUS(request));
  }
}

void Port::sent(void* request, ucs_status_t status, void* message) {
  const std::unique_ptr<Message> owned(static_cast<Message*>(message));
  --owned->sender->n_unsent_;
  owned->settled(status);
  Api::get().request_free(request);
}

void Port::flush(double seconds) {
  const Api& api = Api::get();
  std::vector<ucs_status_ptr_t> requests;
  for (const ucp_ep_h endpoint : endpoints_) {
    ucp_request_param_t param{};
    const ucs_status_ptr_t request = api.ep_flush_nbx(endpoint, &param);
    if (UCS_PTR_IS_PTR(request)) requests.push_back(request);
  }
  const auto is_under_way = [&api](void* request) {
    return api.request_check_status(request) == UCS_INPROGRESS;
  };
  const Deadline deadline = Deadline::after(seconds);
  while (std::any_of(requests.begin(), requests.end(), is_under_way) && !deadline.passed()) progress();
  // One that is still under way UCX frees when its endpoint closes.
  for (void* request : requests) api.request_free(request);
}

bool Port::progress() {
  bool is_busy = reap_closed();
  for (int round = 0; round < kRounds && Api::get().worker_progress(worker_) != 0; ++round) is_busy = true;
  return is_busy;
}

bool Port::reap_closed() {
  const Api& api = Api::get();
  return std::erase_if(closing_, [&api](void* request) {
           if (api.request_check_status(request) == UCS_INPROGRESS) return false;
           api.request_free(request);
           return true;
         }) > 0;
}

void Port::sleep(int fd, int timeout_ms) {
  // Busy: there are events that arming would miss.
  if (Api::get().worker_arm(worker_) != UCS_OK) return;
  pollfd fds[] = {{worker_fd_, POLLIN, 0}, {fd, POLLIN, 0}};
  poll(fds, 2, timeout_ms);
}

}  // namespace p2pkv::ucx
