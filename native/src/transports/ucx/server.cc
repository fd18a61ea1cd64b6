#include "transports/ucx/server.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "page/words.h"

namespace p2pkv::ucx {
namespace {

// With its frame it fits a segment of 64 KiB, so that it is one message and the reader gets it where it
// arrived.
constexpr uint64_t kPieceBytes = 60 * 1024;
// Pieces of small spans that are gathered into one message.
constexpr size_t kMaxGathered = 256;
// What a reader may have on its way before it is waited for.
constexpr uint64_t kWindowBytes = 8 * kPieceBytes;
// Refusals that have not left yet.
constexpr size_t kMaxRefusals = 256;
// Messages for one reader before the next one's turn.
constexpr int kMessagesPerTurn = 16;
constexpr std::chrono::seconds kStallSeconds{30};
// What the end waits for readers to take the good-bye; whom it does not reach learns by its deadline.
constexpr double kGoodbyesSeconds = 0.2;

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
  Sending(Server* server, uint64_t reader, uint64_t serial, std::shared_ptr<RegisteredRegion> region)
      : reader(reader), serial(serial), server_(server), region_(std::move(region)), use_(*region_) {}

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

  const uint64_t reader;
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

// An empty message, which says what it says by its kind.
class Server::Refusal final : public Message {
 public:
  explicit Refusal(size_t* n_queued) : n_queued_(n_queued) { ++*n_queued_; }
  ~Refusal() override { --*n_queued_; }

 private:
  size_t* const n_queued_;
};

std::unique_ptr<Server> Server::start(std::shared_ptr<Context> context, std::shared_ptr<RegionTable> regions,
                                      std::string* error) {
  auto server = std::unique_ptr<Server>(new Server(std::move(regions)));
  server->context_ = context;
  auto port = server->make_port(std::move(context), error);
  if (!port) return nullptr;
  server->address_ = port->address();
  Server* self = server.get();
  Worker::Hooks hooks;
  hooks.turn = [self] { return self->serve(); };
  hooks.tick = [self] { self->drop_stalled(); };
  hooks.is_watchful = [self] { return !self->connections_.empty(); };
  hooks.end = [self] { self->say_goodbye(); };
  server->worker_ = std::make_unique<Worker>(std::move(port), std::move(hooks));
  return server->worker_->start("p2pkv-ucx", error) ? std::move(server) : nullptr;
}

std::unique_ptr<Port> Server::make_port(std::shared_ptr<Context> context, std::string* error) {
  auto port = Port::make(std::move(context), [this](ucp_ep_h endpoint) { lost(endpoint); }, error);
  if (!port) return nullptr;
  port->on_message(kHello, [this](std::string_view frame, std::string_view address, ucp_ep_h from) {
    greeted(frame, address, from);
  });
  port->on_message(kAsk,
                   [this](std::string_view frame, std::string_view spans, ucp_ep_h) { asked(frame, spans); });
  port->on_message(kLeave, [this](std::string_view frame, std::string_view, ucp_ep_h) { left(frame); });
  return port;
}

void Server::close() {
  if (worker_) worker_->close();
  const std::lock_guard lock(mutex_);
  context_.reset();
}

std::shared_ptr<Context> Server::context() {
  const std::lock_guard lock(mutex_);
  return context_;
}

void Server::drop_grant(uint64_t grant) {
  tokens_.revoke(grant);
  worker_->post([this, grant] {
    for (const auto& [reader, connection] : connections_) {
      if (connection.grant == grant) return drop(reader);
    }
  });
}

void Server::drop_readers_of(uint32_t region) {
  worker_->post([this, region] {
    std::vector<uint64_t> hit;
    for (const auto& [reader, connection] : connections_) {
      const auto is_hit = [region](const auto& request) {
        return request->n_in_flight > 0 && request->region->id() == region;
      };
      if (std::any_of(connection.requests.begin(), connection.requests.end(), is_hit)) hit.push_back(reader);
    }
    for (const uint64_t reader : hit) drop(reader);
  });
}

void Server::lost(ucp_ep_h endpoint) {
  for (const auto& [reader, connection] : connections_) {
    if (connection.endpoint == endpoint) doomed_.push_back(reader);
  }
}

void Server::drop(uint64_t reader) {
  const auto at = connections_.find(reader);
  if (at == connections_.end()) return;
  const ucp_ep_h endpoint = at->second.endpoint;
  connections_.erase(at);
  worker_->port().close(endpoint);
}

void Server::greeted(std::string_view bytes, std::string_view address, ucp_ep_h from) {
  HelloFrame frame;
  Connection connection;
  const bool is_ours = read_frame(bytes, &frame) && frame.hello.magic == kHelloMagic &&
                       frame.hello.version == kFrameVersion && !connections_.contains(frame.reader);
  if (!is_ours || !tokens_.redeem(frame.hello.token, &connection.grant)) {
    // Said, because a reader with a token that has lived too long is to come again, and not to wait.
    // What strangers don't take must not pile up.
    if (from != nullptr && n_refusals_ < kMaxRefusals)
      worker_->port().send(from, kRefused, std::make_unique<Refusal>(&n_refusals_));
    return;
  }
  make_room();
  connection.endpoint = worker_->port().connect(address);
  if (connection.endpoint == nullptr) return;
  connection.since = Clock::now();
  connections_.emplace(frame.reader, std::move(connection));
}

void Server::make_room() {
  if (connections_.size() < kMaxConnections) return;
  const auto is_older = [](const auto& a, const auto& b) { return a.second.since < b.second.since; };
  doomed_.push_back(std::min_element(connections_.begin(), connections_.end(), is_older)->first);
}

void Server::asked(std::string_view bytes, std::string_view payload) {
  AskFrame frame;
  if (!read_frame(bytes, &frame)) return;
  const auto at = connections_.find(frame.reader);
  if (at == connections_.end()) return;
  Connection& connection = at->second;
  // The count is checked before anything is allocated for it.
  const bool is_sane = frame.n_spans > 0 && frame.n_spans <= kMaxSpans &&
                       payload.size() == frame.n_spans * sizeof(SpanRequest) &&
                       connection.requests.size() < kMaxRequests;
  if (!is_sane) {
    doomed_.push_back(frame.reader);
    return;
  }
  auto request = std::make_unique<Request>();
  request->id = frame.id;
  request->serial = ++last_serial_;
  request->spans.resize(frame.n_spans);
  std::memcpy(request->spans.data(), payload.data(), payload.size());
  if (!is_valid(*request)) {
    doomed_.push_back(frame.reader);
    return;
  }
  if (connection.requests.empty()) connection.since = Clock::now();
  connection.requests.push_back(std::move(request));
  busy_.insert(frame.reader);
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
    const bool bytes_fit = lies_within(span.offset, span.length, nbytes);
    const bool word_fits = span.want_word == 0 || word_lies_within(span.word_offset, nbytes);
    if (!bytes_fit || !word_fits) return false;
  }
  return true;
}

bool Server::serve() {
  bool is_busy = !doomed_.empty();
  for (const uint64_t reader : std::exchange(doomed_, {})) drop(reader);
  for (auto each = busy_.begin(); each != busy_.end();) {
    const auto at = connections_.find(*each);
    if (at == connections_.end() || at->second.requests.empty()) {
      each = busy_.erase(each);
      continue;
    }
    is_busy |= serve(at->first, at->second);
    ++each;
  }
  return is_busy;
}

bool Server::serve(uint64_t reader, Connection& connection) {
  int n_messages = 0;
  for (auto& request : connection.requests) {
    while (request->has_bytes_left() && n_messages < kMessagesPerTurn &&
           connection.n_bytes_in_flight < kWindowBytes) {
      if (!send_bytes(reader, connection, *request)) break;
      ++n_messages;
    }
    if (request->has_bytes_left()) break;
  }
  auto& requests = connection.requests;
  while (!requests.empty() && !requests.front()->has_bytes_left() && requests.front()->n_in_flight == 0) {
    send_end(reader, connection, *requests.front());
    requests.pop_front();
    ++n_messages;
  }
  return n_messages > 0;
}

// False if the region is closed: then the request is over.
bool Server::send_bytes(uint64_t reader, Connection& connection, Request& request) {
  auto sending = std::make_unique<Sending>(this, reader, request.serial, request.region);
  if (!sending->may_send()) {
    request.is_gone = true;
    return false;
  }
  sending->begin({reader, request.id, request.position});
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
  worker_->port().send(connection.endpoint, kBytes, std::move(sending));
  return true;
}

void Server::bytes_settled(const Sending& sending, bool is_sent) {
  const auto at = connections_.find(sending.reader);
  if (at == connections_.end()) return;
  Connection& connection = at->second;
  connection.n_bytes_in_flight -= sending.nbytes;
  connection.since = Clock::now();
  for (auto& request : connection.requests) {
    if (request->serial == sending.serial) --request->n_in_flight;
  }
  // Bytes that did not go out can't be vouched for, and an endpoint that failed once is done for.
  if (!is_sent) doomed_.push_back(sending.reader);
}

// Called when no send of the request's bytes is under way any more: from here on loads of words come after
// every load of its bytes.
void Server::send_end(uint64_t reader, Connection& connection, Request& request) {
  std::vector<uint64_t> words;
  if (!request.is_gone) {
    const RegisteredRegion::Use use(*request.region);
    request.is_gone = !use;
    for (const SpanRequest& span : request.spans) {
      if (request.is_gone) break;
      if (span.want_word == 1)
        words.push_back(load_word_after_bytes(request.region->base() + span.word_offset));
    }
  }
  const auto status = static_cast<uint32_t>(request.is_gone ? EndStatus::kRegionGone : EndStatus::kOk);
  const EndFrame end{reader, request.id, status, static_cast<uint32_t>(words.size())};
  worker_->port().send(connection.endpoint, kEnd, std::make_unique<Ending>(end, std::move(words)));
}

void Server::left(std::string_view bytes) {
  LeaveFrame frame;
  if (read_frame(bytes, &frame) && connections_.contains(frame.reader)) doomed_.push_back(frame.reader);
}

void Server::say_goodbye() {
  if (connections_.empty()) return;
  for (const auto& [reader, connection] : connections_)
    worker_->port().send(connection.endpoint, kRefused, std::make_unique<Refusal>(&n_refusals_));
  worker_->port().flush(kGoodbyesSeconds);
}

void Server::drop_stalled() {
  const auto now = Clock::now();
  for (const auto& [reader, connection] : connections_) {
    if (connection.n_bytes_in_flight > 0 && now - connection.since > kStallSeconds) doomed_.push_back(reader);
  }
}

}  // namespace p2pkv::ucx
