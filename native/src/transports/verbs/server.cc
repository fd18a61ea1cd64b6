#include "transports/verbs/server.h"

#include <poll.h>

#include <algorithm>

#include "base/clock.h"
#include "net/tokens.h"
#include "transports/verbs/reader.h"

namespace p2pkv::verbs {
namespace {

// A packet every 5 seconds for each reader; with kAckTimeout and kRetries (verbs_queue_pair.cc) the queue
// pair of a killed reader lives on for about 10 seconds.
constexpr auto kKeepAlive = std::chrono::seconds(5);
constexpr int kLookMs = 1000;
// Queue pairs of readers. Each can have three completions outstanding, and devices have queues of 32,767
// entries (Soft-RoCE) and more.
constexpr uint32_t kMaxReaders = 4096;
constexpr uint32_t kCompletionsEach = 3;
constexpr double kGoodByesS = 0.05;
// The most that the control loop waits; connecting takes the device about a millisecond.
constexpr double kReaderConnectS = 0.05;

// What a completion is about, in the low bits of its id; the reader's serial number is above them.
enum Kind : uint64_t { kProbe = 0, kGoodBye = 1, kReceive = 2 };
constexpr uint64_t id_of(uint64_t serial, Kind kind) {
  return serial << 2 | kind;
}

}  // namespace

std::shared_ptr<Server> Server::start(const Rails& rails, std::shared_ptr<Connector> connector,
                                      std::string* error) {
  std::shared_ptr<Server> server(new Server, DeleteUnlessForked<Server>());
  server->rails_ = rails;
  server->connector_ = std::move(connector);
  for (const auto& rail : rails) {
    server->completions_.push_back(CompletionQueue::create(rail, kMaxReaders * kCompletionsEach, error));
    if (!server->completions_.back()) return nullptr;
    server->completions_.back()->arm();
  }
  if (server->thread_.start("p2pkv-verbs", [raw = server.get()] { raw->run(); })) return server;
  *error = "no thread for the verbs transport";
  return nullptr;
}

std::string Server::accept(std::string_view remote, std::string* error) {
  EndpointBlob reader;
  std::vector<LaneBlob> lanes;
  if (!parse_endpoint(remote, &reader, &lanes, error)) return {};
  EndpointBlob blob{};
  blob.magic = kEndpointMagic;
  blob.version = kFrameVersion;
  blob.n_rails = static_cast<uint8_t>(rails_.size());
  fill_random(&blob.nonce, sizeof blob.nonce);
  blob.nonce &= 0xffffff;
  std::vector<Lane> answer;
  for (size_t rail = 0; rail < rails_.size() && answer.size() < lanes.size(); ++rail) {
    Rail::Address now;
    if (!rails_[rail]->address(&now)) continue;  // the next rail takes its place
    const uint32_t packet = first_packet(blob.nonce, reader.nonce);
    answer.push_back(let_in(rail, lanes[answer.size()], packet, error));
  }
  blob.n_lanes = static_cast<uint8_t>(answer.size());
  std::string text = to_blob(blob);
  const Deadline deadline = Deadline::after(kReaderConnectS);
  size_t n_good = 0;
  for (Lane& lane : answer) {
    const bool is_there = lane.blob.queue_pair != 0;
    // One that takes longer may yet be connected when the reader's first packet comes.
    if (is_there && is_known(lane.outcome, deadline.poll_ms() / 1e3)) {
      const std::string& failure = lane.outcome.get();
      if (!failure.empty()) *error = failure;
      if (!failure.empty()) lane.blob = {};
    }
    n_good += lane.blob.queue_pair != 0;
    text += to_blob(lane.blob);
  }
  if (n_good == 0 && error->empty()) *error = "every rail of this node is down";
  return n_good == 0 ? std::string() : text;
}

Server::Lane Server::let_in(size_t rail, const LaneBlob& reader, uint32_t packet, std::string* error) {
  uint64_t serial;
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_ || readers_.size() >= kMaxReaders) {
      *error = is_closed_ ? "the transport is closed"
                          : "this node has " + std::to_string(kMaxReaders) + " readers over verbs already";
      return {};
    }
    serial = ++last_serial_;
  }
  // Room for a probe and a good-bye: nothing else is ever asked of the reader.
  std::shared_ptr<QueuePair> pair = QueuePair::create(rails_[rail], *completions_[rail], {2, 1}, error);
  if (!pair || !pair->post_receive(id_of(serial, kReceive))) return {};
  const LaneBlob blob = pair->describe(static_cast<uint8_t>(rail));
  const Outcome outcome = connector_->connect({completions_[rail], pair, reader, packet});
  const std::lock_guard lock(mutex_);
  if (!is_closed_) readers_[serial] = {rail, std::move(pair), outcome, Clock::now() + kKeepAlive};
  return {blob, outcome};
}

void Server::run() {
  std::vector<pollfd> fds{{stop_.fd(), POLLIN, 0}};
  for (const auto& completions : completions_) fds.push_back({completions->fd(), POLLIN, 0});
  for (;;) {
    poll(fds.data(), fds.size(), kLookMs);
    if (fds[0].revents != 0) return;
    std::vector<Readers::node_type> gone;  // destroyed without the mutex: it takes the device a while
    for (const auto& completions : completions_) {
      completions->drain();
      completions->arm();
      look_at(*completions, &gone);
    }
    probe(&gone);
  }
}

void Server::look_at(CompletionQueue& completions, std::vector<Readers::node_type>* gone) {
  ibv_wc done[64];
  int n;
  while ((n = completions.poll(done, 64)) > 0) {
    const std::lock_guard lock(mutex_);
    for (int i = 0; i < n; ++i) {
      const auto reader = readers_.find(done[i].wr_id >> 2);
      if (reader == readers_.end()) continue;  // what was left of one that is gone
      const bool is_answer = done[i].status == IBV_WC_SUCCESS && (done[i].wr_id & 3) == kProbe;
      if (is_answer) {
        reader->second.is_probing = false;
      } else {
        gone->push_back(readers_.extract(reader));
      }
    }
  }
}

void Server::probe(std::vector<Readers::node_type>* gone) {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  for (auto at = readers_.begin(); at != readers_.end();) {
    const auto reader = at++;
    auto& [rail, pair, outcome, next_probe, is_probing] = reader->second;
    if (is_probing || now < next_probe || !is_known(outcome, 0.0)) continue;
    next_probe = now + kKeepAlive;
    is_probing = true;
    const bool is_posted = pair->is_connected() && pair->post_probe(id_of(reader->first, kProbe));
    if (!is_posted) gone->push_back(readers_.extract(reader));
  }
}

void Server::close() {
  const std::lock_guard closing(closing_);
  stop_.set();
  thread_.join();
  Readers readers;
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    readers.swap(readers_);
  }
  size_t n_leaving = 0;
  for (auto& [serial, reader] : readers) {
    const bool is_connected = is_known(reader.outcome, 0.0) && reader.pair->is_connected();
    n_leaving += is_connected && reader.pair->post_good_bye(id_of(serial, kGoodBye));
  }
  wait_for_good_byes(n_leaving);
}

// Readers that are dead already don't answer: so a little only.
void Server::wait_for_good_byes(size_t n) {
  const Deadline deadline = Deadline::after(kGoodByesS);
  while (n > 0 && !deadline.passed()) {
    std::vector<pollfd> fds;
    for (const auto& completions : completions_) {
      completions->drain();
      completions->arm();
      fds.push_back({completions->fd(), POLLIN, 0});
      ibv_wc done;
      while (n > 0 && completions->poll(&done, 1) > 0) n -= (done.wr_id & 3) == kGoodBye;
    }
    if (n > 0) poll(fds.data(), fds.size(), deadline.poll_ms());
  }
}

}  // namespace p2pkv::verbs
