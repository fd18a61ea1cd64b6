#include "peers/peer_connections.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

namespace p2pkv {
namespace {

// Idle connections a peer; as many batches can read from it at once without a new one.
constexpr size_t kMostIdle = 64;
// What a test read reads: the first generation word of the peer's pool.
constexpr int64_t kProofBytes = 8;

Deadline::Clock::duration to_duration(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

void close_all(const std::vector<PeerConnections::ConnectionPtr>& connections) {
  for (const auto& connection : connections) connection->endpoint->close();
}

}  // namespace

void PeerConnections::change(const std::vector<Member>& changed, const std::vector<uint64_t>& gone) {
  std::vector<ConnectionPtr> closing;
  {
    const std::lock_guard lock(mutex_);
    const auto drop = [&](uint64_t key) {
      const auto found = peers_.find(key);
      if (found == peers_.end()) return;
      closing.insert(closing.end(), found->second.idle.begin(), found->second.idle.end());
      peers_.erase(found);
    };
    for (const uint64_t key : gone) drop(key);
    for (const Member& member : changed) {
      const auto known = peers_.find(member.id.key);
      if (known != peers_.end() && known->second.member.id.boot != member.id.boot) drop(member.id.key);
      Peer& peer = peers_[member.id.key];
      peer.member = member;
      peer.ways.resize(n_ways_);
    }
  }
  close_all(closing);
}

PeerConnections::Peer* PeerConnections::find(PeerId id) {
  const auto found = peers_.find(id.key);
  return found != peers_.end() && found->second.member.id.boot == id.boot ? &found->second : nullptr;
}

PeerConnections::ConnectionPtr PeerConnections::take_idle(PeerId id, std::vector<size_t>* candidates,
                                                          std::vector<ConnectionPtr>* closing) {
  const std::lock_guard lock(mutex_);
  Peer* peer = find(id);
  const auto now = Clock::now();
  if (is_closed_ || peer == nullptr || now < peer->avoid_until || !peer->member.is_healthy) return nullptr;
  while (!peer->idle.empty()) {
    ConnectionPtr connection = std::move(peer->idle.back());
    peer->idle.pop_back();
    if (now >= peer->ways[connection->way].unusable_until) {
      borrowed_.insert(connection);
      return connection;
    }
    closing->push_back(std::move(connection));
  }
  for (const size_t way : peer->member.ways) {
    if (now >= peer->ways[way].unusable_until) candidates->push_back(way);
  }
  return nullptr;
}

PeerConnections::ConnectionPtr PeerConnections::borrow(PeerId id, const Deadline& deadline) {
  std::vector<size_t> candidates;
  std::vector<ConnectionPtr> closing;
  ConnectionPtr connection = take_idle(id, &candidates, &closing);
  close_all(closing);
  return connection ? connection : connect(id, candidates, deadline);
}

PeerConnections::ConnectionPtr PeerConnections::borrow_idle(PeerId id, bool* is_worth_connecting) {
  std::vector<size_t> candidates;
  std::vector<ConnectionPtr> closing;
  ConnectionPtr connection = take_idle(id, &candidates, &closing);
  close_all(closing);
  *is_worth_connecting = !candidates.empty();
  return connection;
}

void PeerConnections::borrow_later(PeerId id, Deadline deadline, std::function<void(Borrowed)> then) {
  const auto run = [this, id, deadline, then = std::move(then)] {
    Borrowed borrowed;
    try {
      borrowed.connection = borrow(id, deadline);
    } catch (...) {
      borrowed.error = std::current_exception();
    }
    then(std::move(borrowed));
  };
  if (!start(run)) run();
}

PeerConnections::ConnectionPtr PeerConnections::connect(PeerId id, const std::vector<size_t>& candidates,
                                                        const Deadline& deadline) {
  const auto began = Clock::now();
  for (const size_t way : candidates) {
    if (ConnectionPtr connection = open(id, way, deadline)) return connection;
    {
      const std::lock_guard lock(mutex_);
      if (is_closed_) return nullptr;
    }
    if (deadline.passed()) {
      if (deadline.at() - began >= to_duration(timing_.fair_chance)) {
        avoid(id);
        connect_between_calls(id, way);
      }
      return nullptr;
    }
    fall_back(id, way, FallBack::kHandshakeFailed);
  }
  return nullptr;
}

PeerConnections::ConnectionPtr PeerConnections::open(PeerId id, size_t way, const Deadline& deadline) {
  Opened opened = hooks_.open(id, way, deadline);
  if (!opened.endpoint) return nullptr;
  auto connection = std::make_shared<Connection>();
  connection->peer = id;
  connection->way = way;
  connection->endpoint = std::move(opened.endpoint);
  connection->remote = std::move(opened.remote);
  {
    const std::lock_guard lock(mutex_);
    if (!is_closed_) {
      borrowed_.insert(connection);
      return connection;
    }
  }
  connection->endpoint->close();
  return nullptr;
}

void PeerConnections::release(const ConnectionPtr& connection, Status worst, ReadAmount amount) {
  const PeerId id = connection->peer;
  {
    const std::lock_guard lock(mutex_);
    borrowed_.erase(connection);
    if (Peer* peer = find(id)) {
      Way& way = peer->ways[connection->way];
      way.has_traffic = true;
      way.amount.n_pages += amount.n_pages;
      way.amount.nbytes += amount.nbytes;
      way.amount.seconds += amount.seconds;
      if (!ends_endpoint(worst)) {
        connection->has_read = true;
        if (amount.n_pages > 0) way.n_failures = 0;
        if (!is_closed_ && peer->idle.size() < kMostIdle) {
          connection->idle_since = Clock::now();
          peer->idle.push_back(connection);
          have_idle_swept();
          return;
        }
      }
    }
  }
  connection->endpoint->close();
  if (worst == Status::kTimedOut && amount.seconds >= timing_.fair_chance) {
    avoid(id);
    if (!connection->has_read) connect_between_calls(id, connection->way);
  } else if (worst == Status::kPeerLost && !connection->has_read) {
    fall_back(id, connection->way, FallBack::kConnectionFailed);
  }
}

void PeerConnections::discard(const ConnectionPtr& connection) {
  {
    const std::lock_guard lock(mutex_);
    borrowed_.erase(connection);
  }
  connection->endpoint->close();
}

void PeerConnections::connect_between_calls(PeerId id, size_t way) {
  {
    // Each call would begin anew, and none succeed: this one has more time than they have.
    const std::lock_guard lock(mutex_);
    Peer* peer = find(id);
    if (is_closed_ || peer == nullptr || peer->ways[way].is_being_connected) return;
    peer->ways[way].is_being_connected = true;
  }
  const auto end = [this, id, way](bool is_reached) {
    const std::lock_guard lock(mutex_);
    Peer* peer = find(id);
    if (peer == nullptr) return;
    peer->ways[way].is_being_connected = false;
    if (is_reached) peer->avoid_until = {};
  };
  const bool is_started = start([this, id, way, end] {
    bool is_reached = false;
    try {
      is_reached = is_proven(id, way, Deadline::after(timing_.patient_connect));
    } catch (...) {
      hooks_.failed(std::current_exception());
    }
    end(is_reached);
  });
  if (!is_started) end(false);
}

bool PeerConnections::is_proven(PeerId id, size_t way, const Deadline& deadline) {
  const auto scratch = hooks_.scratch(way);
  const ConnectionPtr connection = scratch ? open(id, way, deadline) : nullptr;
  if (!connection) return false;
  std::shared_ptr<Transfer> transfer;
  try {
    transfer = connection->endpoint->read(scratch, connection->remote, {{0, 0, kProofBytes}}, {});
    transfer->wait(std::chrono::duration<double>(deadline.at() - Clock::now()).count());
  } catch (...) {
    discard(connection);
    throw;
  }
  const Status status = transfer->statuses().at(0);
  release(connection, status, {});  // no call has waited, so that the peer is blamed for no time
  return !ends_endpoint(status);
}

bool PeerConnections::start(std::function<void()> body) {
  std::list<Connecting> ended;  // joined without the lock
  const std::lock_guard lock(mutex_);
  for (auto it = connecting_.begin(); it != connecting_.end();) {
    const auto next = std::next(it);
    if (it->has_ended) ended.splice(ended.end(), connecting_, it);
    it = next;
  }
  if (is_closed_) return false;
  Connecting& mine = connecting_.emplace_back();
  const bool is_started = mine.thread.start("p2pkv-connect", [this, &mine, body = std::move(body)] {
    body();
    const std::lock_guard ending(mutex_);
    mine.has_ended = true;
  });
  if (!is_started) connecting_.pop_back();
  return is_started;
}

void PeerConnections::avoid(PeerId id) {
  const std::lock_guard lock(mutex_);
  if (Peer* peer = find(id)) peer->avoid_until = Clock::now() + to_duration(timing_.avoid);
}

void PeerConnections::fall_back(PeerId id, size_t way, FallBack why) {
  uint32_t n_before = 0;
  {
    const std::lock_guard lock(mutex_);
    Peer* peer = find(id);
    if (peer == nullptr) return;
    n_before = peer->ways[way].n_failures++;
    const double seconds = timing_.retry_first * std::exp2(std::min(n_before, 10u));
    peer->ways[way].unusable_until = Clock::now() + to_duration(std::min(timing_.retry_most, seconds));
  }
  hooks_.fell_back(id, way, why, n_before == 0);
}

void PeerConnections::have_idle_swept() {
  if (!is_sweeping_) is_sweeping_ = sweeper_.start("p2pkv-idle", [this] { sweep(); });
  if (is_sweeper_asleep_) changed_.notify_one();
}

// Closes what has been idle for long. Those given back last are used first, so a burst's are at the front.
void PeerConnections::sweep() {
  std::unique_lock lock(mutex_);
  while (!is_closed_) {
    const auto until = Clock::now() - to_duration(timing_.idle);
    auto oldest = Clock::time_point::max();
    std::vector<ConnectionPtr> closing;
    for (auto& [key, peer] : peers_) {
      std::erase_if(peer.idle, [&](const ConnectionPtr& connection) {
        if (connection->idle_since > until) return false;
        closing.push_back(connection);
        return true;
      });
      if (!peer.idle.empty()) oldest = std::min(oldest, peer.idle.front()->idle_since);
    }
    if (!closing.empty()) {
      lock.unlock();
      close_all(closing);
      closing.clear();  // without the lock: what a transport in Python opened goes with the interpreter's
      lock.lock();
    } else if (oldest == Clock::time_point::max()) {
      is_sweeper_asleep_ = true;
      changed_.wait(lock);
      is_sweeper_asleep_ = false;
    } else {
      // a little later than the first: others that were given back with it are closed at the same time
      const auto due = oldest + to_duration(1.1 * timing_.idle);
      changed_.wait_until(lock, due, [this] { return is_closed_; });
    }
  }
}

std::vector<PeerConnections::Traffic> PeerConnections::traffic() const {
  const std::lock_guard lock(mutex_);
  std::vector<Traffic> traffic;
  for (const auto& [key, peer] : peers_) {
    for (size_t way = 0; way < n_ways_; ++way) {
      if (peer.ways[way].has_traffic) traffic.push_back({key, way, peer.ways[way].amount});
    }
  }
  return traffic;
}

void PeerConnections::interrupt() {
  std::vector<ConnectionPtr> borrowed;
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    borrowed.assign(borrowed_.begin(), borrowed_.end());
    changed_.notify_all();
  }
  close_all(borrowed);
}

void PeerConnections::close() {
  interrupt();
  std::vector<ConnectionPtr> idle;
  std::list<Connecting> connecting;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [key, peer] : peers_) idle.insert(idle.end(), peer.idle.begin(), peer.idle.end());
    peers_.clear();
    connecting.splice(connecting.end(), connecting_);
  }
  sweeper_.join();
  for (Connecting& each : connecting) each.thread.join();
  close_all(idle);
}

}  // namespace p2pkv
