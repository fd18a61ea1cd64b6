#include "worker.h"

#include <poll.h>

#include <cstdio>
#include <cstdlib>

#include "p2pkv/clock.h"

namespace p2pkv::ucx {
namespace {

// How long the thread goes on polling after the last event. Longer than it takes the peer to answer on a
// quiet machine, and far shorter than a scheduler's slice (guess; see docs/transports.md for what it costs).
constexpr std::chrono::microseconds kSpin{20};
constexpr std::chrono::seconds kTick{1};
// Rounds of progress before tasks are looked at again.
constexpr int kRounds = 16;
// What closing waits for UCX to let go of endpoints and messages; it needs no peer for that.
constexpr double kFinishSeconds = 5.0;

bool has_failed(ucs_status_t status, const char* what, std::string* error) {
  if (status == UCS_OK) return false;
  *error = std::string(what) + ": " + Api::get().status_string(status);
  return true;
}

ucp_context_h make_context(const Settings& settings, std::string* error) {
  const Api& api = Api::get();
  ucp_config_t* config = nullptr;
  if (has_failed(api.config_read(nullptr, nullptr, &config), "cannot read UCX's settings", error))
    return nullptr;
  ucs_status_t status = UCS_OK;
  std::string what = "UCX finds nothing to run on";
  for (const auto& [name, value] : settings) {
    status = api.config_modify(config, name.c_str(), value.c_str());
    // Older ones lack some settings, which then matter less than running at all.
    if (status == UCS_ERR_NO_ELEM) status = UCS_OK;
    if (status == UCS_OK) continue;
    what = "cannot set UCX_" + name + "=" + value;
    break;
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  // Not RMA: with it UCX would answer any peer's software reads and writes of any address.
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.name = "p2pkv";
  ucp_context_h context = nullptr;
  if (status == UCS_OK)
    status = api.init_version(Api::kApiMajor, Api::kApiMinor, &params, config, &context);
  api.config_release(config);
  return has_failed(status, what.c_str(), error) ? nullptr : context;
}

}  // namespace

std::string describe_context(const Settings& settings, std::string* error) {
  const ucp_context_h context = make_context(settings, error);
  if (context == nullptr) return {};
  char* text = nullptr;
  size_t nbytes = 0;
  std::FILE* stream = open_memstream(&text, &nbytes);
  if (stream == nullptr) {
    *error = "no memory";
  } else {
    Api::get().context_print_info(context, stream);
    std::fclose(stream);
  }
  const std::string report(text == nullptr ? "" : text, nbytes);
  std::free(text);
  Api::get().cleanup(context);
  return report;
}

std::unique_ptr<Worker> Worker::make(const Settings& settings, std::string* error) {
  const Api& api = Api::get();
  auto worker = std::unique_ptr<Worker>(new Worker);
  worker->context_ = make_context(settings, error);
  if (worker->context_ == nullptr) return nullptr;
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  // Made here and used by its thread afterwards.
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  ucs_status_t status = api.worker_create(worker->context_, &params, &worker->worker_);
  if (status == UCS_OK) status = api.worker_get_efd(worker->worker_, &worker->worker_fd_);
  return has_failed(status, "cannot make a UCX worker", error) ? nullptr : std::move(worker);
}

void Worker::on_message(unsigned kind, Receive receive) {
  handlers_.push_back(std::make_unique<Handler>(Handler{this, std::move(receive)}));
  ucp_am_handler_param_t param{};
  param.field_mask =
      UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  param.id = kind;
  param.cb = &Worker::receive;
  param.arg = handlers_.back().get();
  Api::get().worker_set_am_recv_handler(worker_, &param);
}

ucs_status_t Worker::receive(void* handler, const void* header, size_t header_length, void* data,
                             size_t length, const ucp_am_recv_param_t* param) {
  auto& self = *static_cast<Handler*>(handler);
  // A rendezvous is nothing that this transport sends: its data is let lie.
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) return UCS_OK;
  const bool has_reply = (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0;
  self.receive({static_cast<const char*>(header), header_length}, {static_cast<const char*>(data), length},
               has_reply ? param->reply_ep : nullptr);
  return UCS_OK;
}

bool Worker::run(const char* thread_name, Hooks hooks, std::string* error) {
  hooks_ = std::move(hooks);
  if (thread_.start(thread_name, [this] { loop(); })) return true;
  *error = "the system has no thread to give";
  return false;
}

void Worker::post(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    if (is_closing_) return;
    tasks_.push_back(std::move(task));
  }
  wakeup_.set();
}

void Worker::close() {
  if (getpid() != pid_) return;  // in a forked child all of it is the parent's
  const std::lock_guard ending(ending_);
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  wakeup_.set();
  thread_.join();
  if (worker_ != nullptr) Api::get().worker_destroy(worker_);
  if (context_ != nullptr) Api::get().cleanup(context_);
  worker_ = nullptr;
  context_ = nullptr;
  handlers_.clear();
  hooks_ = {};
  wakeup_.close();
}

void Worker::send(ucp_ep_h endpoint, unsigned kind, std::unique_ptr<Message> message, bool wants_reply) {
  const Api& api = Api::get();
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
                       UCP_OP_ATTR_FIELD_DATATYPE;
  // Never a rendezvous: it would let the peer write to memory, and wait for it.
  param.flags = UCP_AM_SEND_FLAG_EAGER | (wants_reply ? UCP_AM_SEND_FLAG_REPLY : 0);
  param.cb.send = &Worker::sent;
  message->sender = this;
  param.user_data = message.get();
  const bool is_gathered = message->n_pieces > 0;
  param.datatype = is_gathered ? ucp_dt_make_iov() : ucp_dt_make_contig(1);
  const size_t count = is_gathered ? message->n_pieces : message->payload_nbytes;
  ++n_unsent_;
  const ucs_status_ptr_t request =
      api.am_send_nbx(endpoint, kind, message->frame, message->frame_nbytes, message->payload, count, &param);
  if (UCS_PTR_IS_PTR(request)) {
    message.release();  // comes back in sent()
    return;
  }
  --n_unsent_;
  message->settled(UCS_PTR_STATUS(request));
}

void Worker::sent(void* request, ucs_status_t status, void* message) {
  std::unique_ptr<Message> owned(static_cast<Message*>(message));
  --owned->sender->n_unsent_;
  owned->settled(status);
  Api::get().request_free(request);
}

void Worker::close_endpoint(ucp_ep_h endpoint) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t request = Api::get().ep_close_nbx(endpoint, &param);
  if (UCS_PTR_IS_PTR(request)) closing_.push_back(request);
}

void Worker::loop() {
  const Api& api = Api::get();
  auto last_event = Clock::now();
  for (;;) {
    bool is_busy = run_tasks();
    {
      const std::lock_guard lock(mutex_);
      if (is_closing_ && tasks_.empty()) break;
    }
    for (int round = 0; round < kRounds && api.worker_progress(worker_) != 0; ++round) is_busy = true;
    is_busy |= hooks_.turn();
    is_busy |= reap_closed();
    const auto now = Clock::now();
    if (now >= next_tick_) {
      next_tick_ = now + kTick;
      hooks_.tick();
    }
    if (is_busy) {
      last_event = now;
    } else if (now - last_event >= kSpin) {
      sleep();
      last_event = Clock::now();
    }
  }
  finish();
}

bool Worker::run_tasks() {
  std::vector<std::function<void()>> tasks;
  {
    const std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (auto& task : tasks) task();
  return !tasks.empty();
}

bool Worker::reap_closed() {
  const Api& api = Api::get();
  return std::erase_if(closing_, [&api](void* request) {
           if (api.request_check_status(request) == UCS_INPROGRESS) return false;
           api.request_free(request);
           return true;
         }) > 0;
}

void Worker::sleep() {
  // Busy: there are events that arming would miss.
  if (Api::get().worker_arm(worker_) != UCS_OK) return;
  pollfd fds[] = {{worker_fd_, POLLIN, 0}, {wakeup_.fd(), POLLIN, 0}};
  const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(kTick).count();
  poll(fds, 2, hooks_.is_watchful() ? static_cast<int>(timeout) : -1);
  if (fds[1].revents != 0) wakeup_.clear();
}

void Worker::finish() {
  hooks_.last();
  const Deadline deadline = Deadline::after(kFinishSeconds);
  while ((!closing_.empty() || n_unsent_ > 0) && !deadline.passed()) {
    Api::get().worker_progress(worker_);
    reap_closed();
  }
}

}  // namespace p2pkv::ucx
