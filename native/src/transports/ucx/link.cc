#include "link.h"

#include <cstring>

#include "p2pkv/tokens.h"

namespace p2pkv::ucx {
namespace {

class HelloMessage final : public Message {
 public:
  HelloMessage(const Token& token, uint64_t reader)
      : frame_{{kHelloMagic, kFrameVersion, 0, token}, reader} {
    frame = &frame_;
    frame_nbytes = sizeof frame_;
  }

 private:
  const HelloFrame frame_;
};

class AskMessage final : public Message {
 public:
  explicit AskMessage(Ask ask) : ask_(std::move(ask)) {
    frame = &ask_.frame;
    frame_nbytes = sizeof ask_.frame;
    payload = ask_.spans.data();
    payload_nbytes = ask_.spans.size() * sizeof(SpanRequest);
  }

 private:
  const Ask ask_;
};

void lose(Link& link) {
  const std::lock_guard lock(link.mutex);
  link.is_lost = true;
  link.changed.notify_all();
}

}  // namespace

std::unique_ptr<Links> Links::start(const Address& local, const Settings& settings, std::string* error) {
  auto links = std::unique_ptr<Links>(new Links);
  links->local_ = local;
  links->local_.set_port(0);
  links->worker_ = Worker::make(settings, error);
  if (!links->worker_) return nullptr;
  Links* self = links.get();
  self->worker_->on_message(kBytes, [self](std::string_view frame, std::string_view payload, ucp_ep_h) {
    self->arrived<BytesFrame>(frame, [payload](Arrivals& arrivals, const BytesFrame& bytes) {
      return arrivals.take_bytes(bytes, payload);
    });
  });
  self->worker_->on_message(kEnd, [self](std::string_view frame, std::string_view payload, ucp_ep_h) {
    self->arrived<EndFrame>(frame, [payload](Arrivals& arrivals, const EndFrame& end) {
      return arrivals.take_end(end, payload);
    });
  });
  Worker::Hooks hooks;
  hooks.turn = [self] { return self->drop_failed(); };
  hooks.tick = [] {};
  hooks.is_watchful = [] { return false; };
  hooks.last = [self] {
    while (!self->lines_.empty()) self->drop(self->lines_.begin()->first);
  };
  return self->worker_->run("p2pkv-ucx-read", std::move(hooks), error) ? std::move(links) : nullptr;
}

std::shared_ptr<Link> Links::make() {
  uint64_t id;
  fill_random(&id, sizeof id);
  return std::make_shared<Link>(id);
}

void Links::connect(const std::shared_ptr<Link>& link, const Address& owner, const Token& token) {
  worker_->post([this, link, owner, token] { open(link, owner, token); });
}

void Links::ask(const std::shared_ptr<Link>& link) {
  worker_->post([this, link] {
    const auto at = lines_.find(link->id);
    if (at == lines_.end()) return lose(*link);
    const std::lock_guard lock(link->mutex);
    if (link->arrivals != nullptr) send_asks(at->second, *link->arrivals);
  });
}

void Links::disconnect(const std::shared_ptr<Link>& link) {
  worker_->post([this, id = link->id] { drop(id); });
}

void Links::open(const std::shared_ptr<Link>& link, const Address& owner, const Token& token) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR |
                      UCP_EP_PARAM_FIELD_LOCAL_SOCK_ADDR | UCP_EP_PARAM_FIELD_ERR_HANDLER |
                      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr = {owner.get(), owner.size};
  params.local_sockaddr = {local_.get(), local_.size};
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {&Links::failed, this};
  ucp_ep_h endpoint = nullptr;
  if (Api::get().ep_create(worker_->get(), &params, &endpoint) != UCS_OK) return lose(*link);
  lines_.insert_or_assign(link->id, Line{link, endpoint});
  worker_->send(endpoint, kHello, std::make_unique<HelloMessage>(token, link->id), true);
}

// Called by UCX from within progress, on the worker's thread.
void Links::failed(void* links, ucp_ep_h endpoint, ucs_status_t) {
  auto* self = static_cast<Links*>(links);
  for (const auto& [id, line] : self->lines_) {
    if (line.endpoint == endpoint) self->failed_.push_back(id);
  }
}

void Links::send_asks(Line& line, Arrivals& arrivals) {
  Ask ask;
  while (arrivals.next_ask(&ask)) {
    worker_->send(line.endpoint, kAsk, std::make_unique<AskMessage>(std::move(ask)), true);
    ask = {};
  }
}

// Everything an owner sends starts with the number of the link it is for.
template <typename Frame, typename Take>
void Links::arrived(std::string_view bytes, Take take) {
  Frame frame;
  if (bytes.size() != sizeof frame) return;
  std::memcpy(&frame, bytes.data(), sizeof frame);
  const auto at = lines_.find(frame.reader);
  if (at == lines_.end()) return;
  Link& link = *at->second.link;
  const std::lock_guard lock(link.mutex);
  if (link.arrivals == nullptr) return;
  if (!take(*link.arrivals, frame)) failed_.push_back(frame.reader);
  send_asks(at->second, *link.arrivals);
  if (link.arrivals->is_complete()) link.changed.notify_all();
}

bool Links::drop_failed() {
  const auto failed = std::exchange(failed_, {});
  for (const uint64_t id : failed) drop(id);
  return !failed.empty();
}

void Links::drop(uint64_t id) {
  const auto at = lines_.find(id);
  if (at == lines_.end()) return;
  const Line line = at->second;
  lines_.erase(at);
  lose(*line.link);
  worker_->close_endpoint(line.endpoint);
}

}  // namespace p2pkv::ucx
