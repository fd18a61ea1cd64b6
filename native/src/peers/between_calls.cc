// What the peer layer does between calls, on threads of its own: it connects to peers that take longer than a
// call has time, or that calls to come may read from, and closes what is idle.
#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "peers/peer_connections.h"

namespace p2pkv {
namespace {

// What a test read reads: the first generation word of the peer's pool.
constexpr int64_t kProofBytes = 8;

}  // namespace

void PeerConnections::connect_ahead(PeerId id) {
  size_t first = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    Peer* peer = find(id);
    if (peer == nullptr || now < peer->ahead_from || !is_readable(*peer, now)) return;
    const auto& ways = peer->member.ways;
    const auto way = std::find_if(ways.begin(), ways.end(),
                                  [&](size_t each) { return now >= peer->ways[each].unusable_until; });
    if (way == ways.end()) return;
    peer->ahead_from = now + to_clock(timing_.retry_first);
    first = *way;
  }
  connect_between_calls(id, first);
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

bool PeerConnections::has_other_way(PeerId id) {
  const std::lock_guard lock(mutex_);
  const Peer* const peer = find(id);
  return peer != nullptr && peer->member.ways.size() > 1;
}

bool PeerConnections::is_proven(PeerId id, size_t way, const Deadline& deadline) {
  const auto scratch = hooks_.scratch(way);
  if (!scratch) return false;
  const ConnectionPtr connection = open(id, way, deadline);
  if (!connection) {
    // As within a call. But the only way is not closed to the connections that are there already.
    if (!deadline.passed() && !is_closed() && has_other_way(id)) {
      fall_back(id, way, 0, FallBack::kHandshakeFailed, false);
    }
    return false;
  }
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

void PeerConnections::have_idle_swept() {
  if (!is_sweeping_) is_sweeping_ = sweeper_.start("p2pkv-idle", [this] { sweep(); });
  if (is_sweeper_asleep_) changed_.notify_one();
}

// Closes what has been idle for long. Those given back last are used first, so a burst's are at the front.
void PeerConnections::sweep() {
  std::unique_lock lock(mutex_);
  while (!is_closed_) {
    const auto until = Clock::now() - to_clock(timing_.idle);
    auto oldest = Clock::time_point::max();
    std::vector<ConnectionPtr> closing;
    for (auto& [id, peer] : peers_) {
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
      const auto due = oldest + to_clock(1.1 * timing_.idle);
      changed_.wait_until(lock, due, [this] { return is_closed_; });
    }
  }
}

}  // namespace p2pkv
