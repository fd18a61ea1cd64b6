#include "verbs_owner.h"

#include <poll.h>

#include <algorithm>

#include "p2pkv/clock.h"
#include "p2pkv/tokens.h"
#include "verbs_reader.h"

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
constexpr double kGoodByeS = 0.05;

// What a completion is about, in the low bits of its id; the reader's serial number is above them.
enum Kind : uint64_t { kProbe = 0, kGoodBye = 1, kReceive = 2 };
constexpr uint64_t id_of(uint64_t serial, Kind kind) {
  return serial << 2 | kind;
}

}  // namespace

std::shared_ptr<Owner> Owner::start(const Rails& rails, std::string* error) {
  std::shared_ptr<Owner> owner(new Owner, DeleteUnlessForked<Owner>());
  owner->rails_ = rails;
  for (const auto& rail : rails) {
    owner->completions_.push_back(CompletionQueue::create(rail, kMaxReaders * kCompletionsEach, error));
    if (!owner->completions_.back()) return nullptr;
    owner->completions_.back()->arm();
  }
  if (owner->thread_.start("p2pkv-verbs", [raw = owner.get()] { raw->run(); })) return owner;
  *error = "no thread for the verbs transport";
  return nullptr;
}

std::string Owner::accept(std::string_view remote, std::string* error) {
  EndpointBlob reader;
  std::vector<LaneBlob> lanes;
  if (!parse_endpoint(remote, &reader, &lanes, error)) return {};
  EndpointBlob blob{};
  blob.magic = kEndpointMagic;
  blob.version = kFrameVersion;
  blob.n_rails = static_cast<uint8_t>(rails_.size());
  fill_random(&blob.nonce, sizeof blob.nonce);
  blob.nonce &= 0xffffff;
  std::string answer;
  size_t n_good = 0;
  for (size_t rail = 0; rail < rails_.size() && blob.n_lanes < lanes.size(); ++rail) {
    Rail::Address now;
    if (!rails_[rail]->address(&now)) continue;  // the next rail takes its place
    const LaneBlob lane = let_in(rail, lanes[blob.n_lanes], first_packet(blob.nonce, reader.nonce), error);
    n_good += lane.queue_pair != 0;
    ++blob.n_lanes;
    answer += to_blob(lane);
  }
  if (n_good == 0 && error->empty()) *error = "every rail of this node is down";
  return n_good == 0 ? std::string() : to_blob(blob) + answer;
}

// A lane of zeros, with the reason in `error`, if it can't be had.
LaneBlob Owner::let_in(size_t rail, const LaneBlob& reader, uint32_t packet, std::string* error) {
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
  LaneBlob lane{};
  lane.mtu = reader.mtu;
  // A completion queue for reads is not needed here: the only request is the probe or the good-bye.
  auto pair = QueuePair::create(rails_[rail], *completions_[rail], {2, 1}, error);
  if (!pair || !pair->post_receive(id_of(serial, kReceive)) || !pair->connect(reader, packet, error))
    return lane;
  lane = pair->describe(static_cast<uint8_t>(rail));
  const std::lock_guard lock(mutex_);
  if (is_closed_) return {};
  readers_[serial] = {rail, std::move(pair), Clock::now() + kKeepAlive};
  return lane;
}

void Owner::run() {
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

void Owner::look_at(CompletionQueue& completions, std::vector<Readers::node_type>* gone) {
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

void Owner::probe(std::vector<Readers::node_type>* gone) {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  for (auto at = readers_.begin(); at != readers_.end();) {
    const auto reader = at++;
    auto& [rail, pair, next_probe, is_probing] = reader->second;
    if (is_probing || now < next_probe) continue;
    next_probe = now + kKeepAlive;
    is_probing = true;
    if (!pair->post_probe(id_of(reader->first, kProbe))) gone->push_back(readers_.extract(reader));
  }
}

void Owner::close() {
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
  for (auto& [serial, reader] : readers) n_leaving += reader.pair->post_good_bye(id_of(serial, kGoodBye));
  wait_for_good_byes(n_leaving);
}

// Readers that are dead already don't answer: so a little only.
void Owner::wait_for_good_byes(size_t n) {
  const Deadline deadline = Deadline::after(kGoodByeS);
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
