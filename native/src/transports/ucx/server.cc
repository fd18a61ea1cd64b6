#include "server.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "p2pkv/words.h"

namespace p2pkv::ucx {
namespace {

// With its frame it fits a segment of 64 KiB, so that it is one message and the reader gets it where it
// arrived.
constexpr uint64_t kPieceBytes = 60 * 1024;
// Pieces of small spans that are gathered into one message.
constexpr size_t kMaxGathered = 256;
// What a reader may have on its way before it is waited for.
constexpr uint64_t kWindowBytes = 8 * kPieceBytes;
// Messages for one reader before the next one's turn.
constexpr int kMessagesPerTurn = 16;
constexpr std::chrono::seconds kVisitSeconds{5};
constexpr std::chrono::seconds kStallSeconds{30};

template <typename T>
bool read_frame(std::string_view bytes, T* frame) {
  if (bytes.size() != sizeof(T)) return false;
  std::memcpy(frame, bytes.data(), sizeof(T));
  return true;
}

}  // namespace

// A piece of a request's bytes on its way. The region can't be closed meanwhile.
class Server::Sending final : public Message {
 public:
  Sending(Server* server, uint64_t number, uint64_t serial, std::shared_ptr<RegisteredRegion> region)
      : number(number), serial(serial), server_(server), region_(std::move(region)), use_(*region_) {}

  bool may_send() const { return static_cast<bool>(use_); }
  void begin(const BytesFrame& bytes) {
    frame_ = bytes;
    frame = &frame_;
    frame_nbytes = sizeof frame_;
  }
  void add(const uint8_t* from, uint64_t length) {
    pieces_.push_back({const_cast<uint8_t*>(from), length});
    nbytes += length;
  }
  void seal() {
    payload = pieces_[0].buffer;
    payload_nbytes = nbytes;
    if (pieces_.size() == 1) return;
    payload = pieces_.data();
    n_pieces = pieces_.size();
  }
  size_t n_gathered() const { return pieces_.size(); }

  void settled(ucs_status_t status) override { server_->bytes_settled(*this, status == UCS_OK); }

  const uint64_t number;  // of the connection
  const uint64_t serial;  // of the request
  uint64_t nbytes = 0;

 private:
  Server* const server_;
  const std::shared_ptr<RegisteredRegion> region_;
  const RegisteredRegion::Use use_;
  BytesFrame frame_{};
  std::vector<ucp_dt_iov_t> pieces_;
};

class Server::Ending final : public Message {
 public:
  Ending(const EndFrame& end, std::vector<uint64_t> words) : frame_(end), words_(std::move(words)) {
    frame = &frame_;
    frame_nbytes = sizeof frame_;
    payload = words_.data();
    payload_nbytes = words_.size() * sizeof(uint64_t);
  }

 private:
  const EndFrame frame_;
  const std::vector<uint64_t> words_;
};

std::unique_ptr<Server> Server::start(const Address& address, const Settings& settings,
                                      std::shared_ptr<RegionTable> regions, std::string* error) {
  auto server = std::unique_ptr<Server>(new Server(std::move(regions)));
  server->address_ = address;
  server->worker_ = Worker::make(settings, error);
  if (!server->worker_) return nullptr;
  Server* self = server.get();
  self->worker_->on_message(
      kHello, [self](std::string_view frame, std::string_view, ucp_ep_h from) { self->greeted(frame, from); });
  self->worker_->on_message(kAsk, [self](std::string_view frame, std::string_view payload, ucp_ep_h from) {
    self->asked(frame, payload, from);
  });
  if (!self->listen(error)) return nullptr;
  Worker::Hooks hooks;
  hooks.turn = [self] { return self->serve(); };
  hooks.tick = [self] { self->drop_stalled(); };
  hooks.is_watchful = [self] { return !self->connections_.empty(); };
  hooks.last = [self] {
    Api::get().listener_destroy(self->listener_);
    while (!self->connections_.empty()) self->drop(self->connections_.begin()->first);
  };
  if (self->worker_->run("p2pkv-ucx-own", std::move(hooks), error)) return server;
  Api::get().listener_destroy(self->listener_);
  return nullptr;
}

bool Server::listen(std::string* error) {
  const Api& api = Api::get();
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr = {address_.get(), address_.size};
  params.conn_handler = {&Server::knocked, this};
  ucs_status_t status = api.listener_create(worker_->get(), &params, &listener_);
  ucp_listener_attr_t attr{};
  attr.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  if (status == UCS_OK) status = api.listener_query(listener_, &attr);
  if (status != UCS_OK) {
    *error = std::string("UCX cannot listen there: ") + api.status_string(status);
    return false;
  }
  Address bound;
  bound.storage = attr.sockaddr;
  address_.set_port(bound.port());
  return true;
}

void Server::drop_grant(uint64_t grant) {
  tokens_.revoke(grant);
  worker_->post([this, grant] {
    for (const auto& [number, connection] : connections_) {
      if (connection.is_admitted && connection.grant == grant) return drop(number);
    }
  });
}

void Server::drop_readers_of(uint32_t region) {
  worker_->post([this, region] {
    std::vector<uint64_t> hit;
    for (const auto& [number, connection] : connections_) {
      const auto is_hit = [region](const auto& request) {
        return request->n_in_flight > 0 && request->region->id() == region;
      };
      if (std::any_of(connection.requests.begin(), connection.requests.end(), is_hit)) hit.push_back(number);
    }
    for (const uint64_t number : hit) drop(number);
  });
}

// Called by UCX from within progress, on the worker's thread.
void Server::knocked(ucp_conn_request_h request, void* server) {
  static_cast<Server*>(server)->admit(request);
}

void Server::failed(void* server, ucp_ep_h endpoint, ucs_status_t) {
  auto* self = static_cast<Server*>(server);
  if (const uint64_t number = self->number_of(endpoint)) self->failed_.push_back(number);
}

void Server::admit(ucp_conn_request_h request) {
  drop_oldest_visitor();
  if (connections_.size() >= kMaxConnections) {
    Api::get().listener_reject(listener_, request);
    return;
  }
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST | UCP_EP_PARAM_FIELD_ERR_HANDLER |
                      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.conn_request = request;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {&Server::failed, this};
  ucp_ep_h endpoint = nullptr;
  // On failure UCX has rejected the request itself.
  if (Api::get().ep_create(worker_->get(), &params, &endpoint) != UCS_OK) return;
  const uint64_t number = ++last_number_;
  Connection connection{};
  connection.endpoint = endpoint;
  connection.since = Clock::now();
  connections_.emplace(number, std::move(connection));
  numbers_.emplace(endpoint, number);
}

void Server::drop_oldest_visitor() {
  size_t n_visitors = 0;
  uint64_t oldest = UINT64_MAX;
  for (const auto& [number, connection] : connections_) {
    if (connection.is_admitted) continue;
    ++n_visitors;
    oldest = std::min(oldest, number);
  }
  if (n_visitors >= kMaxVisitors) failed_.push_back(oldest);
}

void Server::drop(uint64_t number) {
  const auto at = connections_.find(number);
  if (at == connections_.end()) return;
  const ucp_ep_h endpoint = at->second.endpoint;
  numbers_.erase(endpoint);
  connections_.erase(at);
  worker_->close_endpoint(endpoint);
}

uint64_t Server::number_of(ucp_ep_h endpoint) const {
  const auto at = numbers_.find(endpoint);
  return at == numbers_.end() ? 0 : at->second;
}

void Server::greeted(std::string_view bytes, ucp_ep_h from) {
  const uint64_t number = number_of(from);
  if (number == 0) return;
  Connection& connection = connections_.at(number);
  HelloFrame frame;
  const bool is_ours = read_frame(bytes, &frame) && frame.hello.magic == kHelloMagic &&
                       frame.hello.version == kFrameVersion && !connection.is_admitted;
  if (!is_ours || !tokens_.redeem(frame.hello.token, &connection.grant)) {
    failed_.push_back(number);
    return;
  }
  connection.is_admitted = true;
  connection.reader = frame.reader;
  connection.since = Clock::now();
}

void Server::asked(std::string_view bytes, std::string_view payload, ucp_ep_h from) {
  const uint64_t number = number_of(from);
  if (number == 0) return;
  Connection& connection = connections_.at(number);
  AskFrame frame;
  // The count is checked before anything is allocated for it.
  const bool is_sane = connection.is_admitted && read_frame(bytes, &frame) && frame.n_spans > 0 &&
                       frame.n_spans <= kMaxSpans && payload.size() == frame.n_spans * sizeof(SpanRequest) &&
                       connection.requests.size() < kMaxRequests;
  if (!is_sane) {
    failed_.push_back(number);
    return;
  }
  auto request = std::make_unique<Request>();
  request->id = frame.id;
  request->serial = ++last_serial_;
  request->spans.resize(frame.n_spans);
  std::memcpy(request->spans.data(), payload.data(), payload.size());
  if (!is_valid(*request)) {
    failed_.push_back(number);
    return;
  }
  if (connection.requests.empty()) connection.since = Clock::now();
  connection.requests.push_back(std::move(request));
}

// The reader has refused what is out of range already: one that asks for it here is not one of ours.
bool Server::is_valid(Request& request) const {
  const uint32_t id = request.spans[0].region;
  request.region = regions_->find(id);
  request.is_gone = !request.region;
  for (const SpanRequest& span : request.spans) {
    if (span.want_word > 1 || span.region != id) return false;
    if (request.is_gone) continue;
    const uint64_t nbytes = request.region->nbytes();
    const bool bytes_fit = span.length <= nbytes && span.offset <= nbytes - span.length;
    const bool word_fits =
        span.want_word == 0 || (span.word_offset % 8 == 0 && nbytes >= 8 && span.word_offset <= nbytes - 8);
    if (!bytes_fit || !word_fits) return false;
  }
  return true;
}

bool Server::serve() {
  bool is_busy = !failed_.empty();
  for (const uint64_t number : std::exchange(failed_, {})) drop(number);
  for (auto& [number, connection] : connections_) {
    if (!connection.requests.empty()) is_busy |= serve(number, connection);
  }
  return is_busy;
}

bool Server::serve(uint64_t number, Connection& connection) {
  int n_messages = 0;
  for (auto& request : connection.requests) {
    while (request->has_bytes_left() && n_messages < kMessagesPerTurn &&
           connection.n_bytes_in_flight < kWindowBytes) {
      if (!send_bytes(number, connection, *request)) break;
      ++n_messages;
    }
    if (request->has_bytes_left()) break;
  }
  auto& requests = connection.requests;
  while (!requests.empty() && !requests.front()->has_bytes_left() && requests.front()->n_in_flight == 0) {
    send_end(connection, *requests.front());
    requests.pop_front();
    ++n_messages;
  }
  return n_messages > 0;
}

// False if the region is closed: then the request is over.
bool Server::send_bytes(uint64_t number, Connection& connection, Request& request) {
  auto sending = std::make_unique<Sending>(this, number, request.serial, request.region);
  if (!sending->may_send()) {
    request.is_gone = true;
    return false;
  }
  sending->begin({connection.reader, request.id, request.position});
  while (request.at < request.spans.size() && sending->nbytes < kPieceBytes &&
         sending->n_gathered() < kMaxGathered) {
    const SpanRequest& span = request.spans[request.at];
    const uint64_t nbytes = std::min(span.length - request.sent, kPieceBytes - sending->nbytes);
    if (nbytes > 0) sending->add(request.region->base() + span.offset + request.sent, nbytes);
    request.sent += nbytes;
    if (request.sent == span.length) {
      ++request.at;
      request.sent = 0;
    }
  }
  if (sending->nbytes == 0) return true;  // empty spans only
  sending->seal();
  request.position += sending->nbytes;
  connection.n_bytes_in_flight += sending->nbytes;
  ++request.n_in_flight;
  worker_->send(connection.endpoint, kBytes, std::move(sending));
  return true;
}

void Server::bytes_settled(const Sending& sending, bool is_sent) {
  const auto at = connections_.find(sending.number);
  if (at == connections_.end()) return;
  Connection& connection = at->second;
  connection.n_bytes_in_flight -= sending.nbytes;
  connection.since = Clock::now();
  for (auto& request : connection.requests) {
    if (request->serial == sending.serial) --request->n_in_flight;
  }
  // Bytes that did not go out can't be vouched for, and an endpoint that failed once is done for.
  if (!is_sent) failed_.push_back(sending.number);
}

// Called when no send of the request's bytes is under way any more: from here on loads of words come after
// every load of its bytes.
void Server::send_end(Connection& connection, Request& request) {
  std::vector<uint64_t> words;
  if (!request.is_gone) {
    const RegisteredRegion::Use use(*request.region);
    request.is_gone = !use;
    for (const SpanRequest& span : request.spans) {
      if (request.is_gone) break;
      if (span.want_word == 1) words.push_back(load_word_after_bytes(request.region->base() + span.word_offset));
    }
  }
  const auto status = static_cast<uint32_t>(request.is_gone ? EndStatus::kRegionGone : EndStatus::kOk);
  const EndFrame end{connection.reader, request.id, status, static_cast<uint32_t>(words.size())};
  worker_->send(connection.endpoint, kEnd, std::make_unique<Ending>(end, std::move(words)));
}

void Server::drop_stalled() {
  const auto now = Clock::now();
  for (const auto& [number, connection] : connections_) {
    const bool is_late = !connection.is_admitted && now - connection.since > kVisitSeconds;
    const bool is_stalled = connection.n_bytes_in_flight > 0 && now - connection.since > kStallSeconds;
    if (is_late || is_stalled) failed_.push_back(number);
  }
}

}  // namespace p2pkv::ucx
