#include "control/control_loop.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "directory/requests.h"

namespace p2pkv {
namespace {

using wire::Header;
using wire::Kind;
using wire::ReplyStatus;

constexpr int kTickMs = 100;
// Events Python has not taken yet; beyond that the oldest goes: its sender will ask again.
constexpr size_t kMaxEvents = 256;
constexpr size_t kMaxTransportName = 64;
// Of EXPLAIN: a key of 65,536 bytes and a namespace, with room to spare. What waits for Python is bounded.
constexpr size_t kMaxQuestion = 256 << 10;
// Of TAKE_OVER: 512 pages, with room to spare.
constexpr size_t kMaxTakeOver = 64 << 10;

// What `reply` takes apart again.
std::string route_to(const std::string& peer, const Header& header) {
  std::string route;
  wire::append(route, header);
  return route + peer;
}

}  // namespace

ControlLoop::ControlLoop(void* socket, std::shared_ptr<Shard> shard, std::shared_ptr<NamespaceEpochs> epochs)
    : shard_(std::move(shard)), epochs_(std::move(epochs)) {
  thread_ = std::make_unique<ZmqServerThread>(
      socket, "p2pkv-control", kTickMs,
      ZmqServerThread::Callbacks{[this](Frames frames) { received(std::move(frames)); }, [this] { woken(); },
                                 [this] {
                                   if (boot_ != 0) epochs_->vigil().turned();  // else nobody is heard
                                   shard_->sweep(shard_->now());
                                 }});
}

void ControlLoop::announce(uint64_t node_key, uint64_t boot) {
  node_key_ = node_key;
  boot_ = boot;
  const std::lock_guard lock(mutex_);
  if (directory_) directory_->announce(boot);
}

void ControlLoop::withdraw() {
  announce(node_key_, 0);
}

void ControlLoop::serve_promotions(std::shared_ptr<Promoter> promoter) {
  const std::lock_guard lock(mutex_);
  if (directory_) directory_->serve_promotions(promoter);
  promoter_ = std::move(promoter);
}

void ControlLoop::serve_directory(std::shared_ptr<DirectoryServer> server) {
  serve(kDirectory, server, {});
  server->announce(boot_);
  const std::lock_guard lock(mutex_);
  directory_ = std::move(server);
}

void ControlLoop::stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  thread_->stop();
  std::lock_guard lock(mutex_);
  for (BindRequest* request : binds_) *request = {request->address, request->is_bind, ECANCELED, true};
  binds_.clear();
  changed_.notify_all();
}

void ControlLoop::received(Frames frames) {
  ++requests_;
  // The ROUTER's identity frame and one body; anything else is not from a node of ours.
  if (frames.size() != 2 || frames[1].size() < sizeof(Header)) {
    ++malformed_;
    return;
  }
  wire::Reader body(frames[1]);
  const Header header = *body.value<Header>();
  if (header.magic != wire::kMagic) {
    ++malformed_;
    return;
  }
  if (boot_ == 0) return;  // not a member yet, or no longer
  if (header.version != wire::kVersion) return refuse(frames[0], header, ReplyStatus::kVersion);
  if (header.boot != 0 && header.boot != boot_) return refuse(frames[0], header, ReplyStatus::kWrongBoot);
  answer(frames[0], header, body);
}

void ControlLoop::answer(const std::string& peer, const Header& header, wire::Reader body) {
  switch (static_cast<Kind>(header.kind)) {
    case Kind::kProbe:
      return probe(peer, header);
    case Kind::kGet:
    case Kind::kLocate:
    case Kind::kHeld:
    case Kind::kPut:
    case Kind::kDrop:
    case Kind::kCheck:
      return answer_directory(peer, header, body);
    case Kind::kPromote:
      return promote(peer, header, body);
    case Kind::kConnect:
      return connect(peer, header, body);
    case Kind::kExchange:
      return exchange(peer, header, body);
    case Kind::kGossip:
      queue({Kind::kExchange, {}, std::string(body.rest())});
      return probe(peer, header);
    case Kind::kCounters:
      return counters(peer, header, body);
    case Kind::kEpochs:
      return epochs(peer, header, body);
    case Kind::kFollow:
      return follow(peer, header, body);
    case Kind::kTakeBack:
      return take_back(peer, header, body);
    case Kind::kHandOver:
      if (!has_cache()) return refuse(peer, header, ReplyStatus::kRefused, "it has no cache");
      if (body.rest().size() > (wire::kMaxEntries + 1) * sizeof(Key)) {
        return refuse(peer, header, ReplyStatus::kMalformed, "wrong length of a hand-over");
      }
      return queue({Kind::kHandOver, route_to(peer, header), std::string(body.rest())});
    case Kind::kTakeOver:
    case Kind::kLetGo:
    case Kind::kDrain:
      if (!has_cache()) return refuse(peer, header, ReplyStatus::kRefused, "it has no cache");
      if (body.rest().size() > kMaxTakeOver) {
        return refuse(peer, header, ReplyStatus::kMalformed, "too many pages to be taken over at once");
      }
      return queue({static_cast<Kind>(header.kind), route_to(peer, header), std::string(body.rest())});
    case Kind::kRouters:
      return routers(peer, header);
    case Kind::kExplain:
      return explain(peer, header, body);
    default:
      return refuse(peer, header, ReplyStatus::kMalformed, "unknown kind of request");
  }
}

void ControlLoop::refuse(const std::string& peer, const Header& header, ReplyStatus status,
                         std::string_view reason) {
  if (status == ReplyStatus::kMalformed) ++malformed_;
  send(peer, wire::make_reply(header, status, boot_, 0), reason);
}

void ControlLoop::send(const std::string& peer, const Header& header, std::string_view body) {
  std::string message;
  message.reserve(sizeof header + body.size());
  wire::append(message, header);
  message.append(body);
  thread_->send({peer, std::move(message)});
}

void ControlLoop::probe(const std::string& peer, const Header& header) {
  wire::ProbeReply reply{node_key_, 0};
  {
    std::lock_guard lock(mutex_);
    reply.digest = digest_;
  }
  std::string body;
  wire::append(body, reply);
  send(peer, wire::make_reply(header, ReplyStatus::kOk, boot_, 1), body);
}

void ControlLoop::answer_directory(const std::string& peer, const Header& header, wire::Reader body) {
  std::string reply = answer_directory_request(*shard_, header, body, boot_);
  Header answered;
  std::memcpy(&answered, reply.data(), sizeof answered);
  if (answered.status == static_cast<uint32_t>(ReplyStatus::kMalformed)) ++malformed_;
  thread_->send({peer, std::move(reply)});
}

void ControlLoop::promote(const std::string& peer, const Header& header, wire::Reader body) {
  std::shared_ptr<Promoter> promoter;
  {
    const std::lock_guard lock(mutex_);
    promoter = promoter_;
  }
  // Nothing tells when a ZMQ peer is gone. Its number must differ from those of channels, which are small.
  const Asker asker{kLongestUnwatchedLease, std::hash<std::string>{}(peer) | uint64_t{1} << 63};
  answer_promotion(promoter.get(), header, body, boot_, asker,
                   [this, peer](std::string reply) { send_from_anywhere({peer, std::move(reply)}); });
}

void ControlLoop::connect(const std::string& peer, const Header& header, wire::Reader body) {
  const auto name_size = body.value<uint32_t>();
  const auto name = name_size && *name_size <= kMaxTransportName ? body.bytes(*name_size) : std::nullopt;
  if (!name) return refuse(peer, header, ReplyStatus::kMalformed, "wrong length of a connect");
  Served served;
  {
    std::lock_guard lock(mutex_);
    const auto found = served_.find(std::string(*name));
    if (found == served_.end()) {
      return refuse(peer, header, ReplyStatus::kRefused, "this transport is not served here");
    }
    served = found->second;
  }
  if (served.acceptor == nullptr) {
    std::string rest;  // what Python parses: the name's length, the name, the reader's half
    wire::append(rest, *name_size);
    rest.append(*name).append(body.rest());
    return queue({Kind::kConnect, route_to(peer, header), std::move(rest)});
  }
  std::string error;
  const std::string half = served.acceptor->accept(body.rest(), &error);
  if (half.empty()) return refuse(peer, header, ReplyStatus::kRefused, error);
  std::string reply;
  wire::append(reply, static_cast<uint32_t>(half.size()));
  reply += half;
  reply += served.regions;
  send(peer, wire::make_reply(header, ReplyStatus::kOk, boot_, 1), reply);
}

void ControlLoop::exchange(const std::string& peer, const Header& header, wire::Reader body) {
  std::string view;
  {
    std::lock_guard lock(mutex_);
    view = view_;
  }
  send(peer, wire::make_reply(header, ReplyStatus::kOk, boot_, 1), view);
  queue({Kind::kExchange, {}, std::string(body.rest())});
}

void ControlLoop::routers(const std::string& peer, const Header& header) {
  std::string known;
  {
    const std::lock_guard lock(mutex_);
    known = routers_;
  }
  send(peer, wire::make_reply(header, ReplyStatus::kOk, boot_, 1), known);
}

void ControlLoop::counters(const std::string& peer, const Header& header, wire::Reader body) {
  if (!body.rest().empty()) return refuse(peer, header, ReplyStatus::kMalformed, "counters takes no body");
  queue({Kind::kCounters, route_to(peer, header), {}});
}

void ControlLoop::epochs(const std::string& peer, const Header& header, wire::Reader body) {
  std::vector<NamespaceEpoch> told;
  if (!wire::take_records(body, header.count, &told)) {
    return refuse(peer, header, ReplyStatus::kMalformed, "wrong length of epochs");
  }
  if (!epochs_->raise(told.data(), told.size())) {
    return refuse(peer, header, ReplyStatus::kMalformed, "an epoch is beyond every clock");
  }
  const std::vector<NamespaceEpoch> known = epochs_->all();
  std::string reply;
  for (const NamespaceEpoch& epoch : known) wire::append(reply, epoch);
  send(peer, wire::make_reply(header, ReplyStatus::kOk, boot_, static_cast<uint32_t>(known.size())), reply);
}

void ControlLoop::explain(const std::string& peer, const Header& header, wire::Reader body) {
  if (body.rest().size() > kMaxQuestion) {
    return refuse(peer, header, ReplyStatus::kMalformed, "a question about a page is too long");
  }
  queue({Kind::kExplain, route_to(peer, header), std::string(body.rest())});
}

void ControlLoop::queue(ControlEvent event) {
  std::lock_guard lock(mutex_);
  auto& events = queues_[event.kind].events;
  if (events.size() >= kMaxEvents) {
    events.pop_front();
    ++dropped_events_;
  }
  events.push_back(std::move(event));
  changed_.notify_all();
}

std::optional<ControlEvent> ControlLoop::take(Kind kind, double timeout) {
  std::unique_lock lock(mutex_);
  Queue& queue = queues_[kind];
  changed_.wait_for(lock, std::chrono::duration<double>(timeout),
                    [&] { return stopped_ || queue.woken || !queue.events.empty(); });
  queue.woken = false;
  if (stopped_ || queue.events.empty()) return std::nullopt;
  ControlEvent event = std::move(queue.events.front());
  queue.events.pop_front();
  return event;
}

void ControlLoop::wake(Kind kind) {
  std::lock_guard lock(mutex_);
  queues_[kind].woken = true;
  changed_.notify_all();
}

void ControlLoop::reply(const std::string& route, ReplyStatus status, const std::string& body) {
  if (route.size() < sizeof(Header)) return;
  Header header;
  std::memcpy(&header, route.data(), sizeof header);
  std::string message;
  wire::append(message, wire::make_reply(header, status, boot_, 1));
  message += body;
  send_from_anywhere({route.substr(sizeof header), std::move(message)});
}

void ControlLoop::send_from_anywhere(Frames frames) {
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return;
    outgoing_.push_back(std::move(frames));
  }
  thread_->wake();
}

int ControlLoop::bind(const std::string& address) {
  return rebind({address, true});
}

int ControlLoop::unbind(const std::string& address) {
  return rebind({address, false});
}

int ControlLoop::rebind(BindRequest request) {
  std::unique_lock lock(mutex_);
  if (stopped_) return ECANCELED;
  binds_.push_back(&request);
  thread_->wake();
  changed_.wait(lock, [&] { return request.done; });
  return request.result;
}

void ControlLoop::woken() {
  std::deque<Frames> outgoing;
  std::unique_lock lock(mutex_);
  outgoing.swap(outgoing_);
  for (BindRequest* request : binds_) {
    const char* const address = request->address.c_str();
    request->result = request->is_bind ? thread_->bind(address) : thread_->unbind(address);
    request->done = true;
  }
  binds_.clear();
  changed_.notify_all();
  lock.unlock();
  for (const Frames& frames : outgoing) thread_->send(frames);
  go_on_taking_back();
}

void ControlLoop::set_routers(std::string routers) {
  const std::lock_guard lock(mutex_);
  routers_ = std::move(routers);
}

void ControlLoop::set_view(std::string view, uint64_t digest) {
  std::lock_guard lock(mutex_);
  view_ = std::move(view);
  digest_ = digest;
}

void ControlLoop::serve(const std::string& name, std::shared_ptr<Acceptor> acceptor, std::string regions) {
  std::lock_guard lock(mutex_);
  served_[name] = {std::move(acceptor), std::move(regions)};
}

ControlLoop::Stats ControlLoop::stats() {
  uint64_t n_queued = 0;
  const std::lock_guard lock(mutex_);
  for (const auto& [kind, queue] : queues_) n_queued += queue.events.size();
  return {requests_, malformed_, dropped_events_, n_queued};
}

}  // namespace p2pkv
