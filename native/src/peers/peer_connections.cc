#include "peers/peer_connections.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

namespace p2pkv {
namespace {

// Idle connections a peer; as many batches can read from it at once without a new one.
constexpr size_t kMostIdle = 64;

}  // namespace

void PeerConnections::close_all(const std::vector<ConnectionPtr>& connections) {
  for (const auto& connection : connections) connection->endpoint->close();
}

void PeerConnections::change(const std::vector<Member>& changed, const std::vector<uint64_t>& gone) {
  std::vector<ConnectionPtr> closing;
  {
    const std::lock_guard lock(mutex_);
    const auto leave = [&](uint64_t key, std::optional<uint64_t> but_boot) {
      for (auto it = peers_.lower_bound({key, 0}); it != peers_.end() && it->first.key == key;) {
        const auto known = it++;
        if (known->first.boot == but_boot) continue;
        known->second.is_member = false;
        prune(known, &closing);
      }
    };
    for (const uint64_t key : gone) leave(key, std::nullopt);
    for (const Member& member : changed) {
      leave(member.id.key, member.id.boot);
      Peer& peer = at(member.id);
      peer.member = member;
      peer.is_member = true;
    }
  }
  close_all(closing);
}

void PeerConnections::add_link(PeerId id, uint64_t link) {
  const std::lock_guard lock(mutex_);
  at(id).links[link].resize(n_ways_);
}

void PeerConnections::drop_link(PeerId id, uint64_t link) {
  std::vector<ConnectionPtr> closing;
  {
    const std::lock_guard lock(mutex_);
    const auto known = peers_.find(id);
    if (known == peers_.end()) return;
    known->second.links.erase(link);
    prune(known, &closing);
  }
  close_all(closing);
}

PeerConnections::Peer* PeerConnections::find(PeerId id) {
  const auto found = peers_.find(id);
  return found != peers_.end() ? &found->second : nullptr;
}

PeerConnections::Peer& PeerConnections::at(PeerId id) {
  Peer& peer = peers_[id];
  peer.ways.resize(n_ways_);
  return peer;
}

void PeerConnections::prune(Peers::iterator known, std::vector<ConnectionPtr>* closing) {
  Peer& peer = known->second;
  take_out(peer, [&](const Connection& idle) { return !peer.keeps(idle); }, closing);
  if (!peer.is_member && peer.links.empty()) peers_.erase(known);
}

void PeerConnections::take_out(Peer& peer, const std::function<bool(const Connection&)>& which,
                               std::vector<ConnectionPtr>* closing) {
  std::erase_if(peer.idle, [&](const ConnectionPtr& connection) {
    if (!which(*connection)) return false;
    closing->push_back(connection);
    return true;
  });
}

PeerConnections::ConnectionPtr PeerConnections::lend(Peer& peer,
                                                     const std::function<bool(const Connection&)>& suits) {
  const auto suited = std::find_if(peer.idle.rbegin(), peer.idle.rend(),
                                   [&](const ConnectionPtr& connection) { return suits(*connection); });
  if (suited == peer.idle.rend()) return nullptr;
  ConnectionPtr connection = std::move(*suited);
  peer.idle.erase(std::next(suited).base());
  borrowed_.insert(connection);
  return connection;
}

bool PeerConnections::is_readable(const Peer& peer, Clock::time_point now) const {
  if (is_closed_ || !peer.is_member || now < peer.avoid_until) return false;
  // A probe that a stopped peer has not answered may make it a suspect after it has gone on and was read.
  return peer.member.is_healthy || now < peer.proven_until;
}

std::vector<PeerConnections::Standing> PeerConnections::standings(const std::vector<PeerId>& peers) {
  std::vector<Standing> standings(peers.size());
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  for (size_t i = 0; i < peers.size(); ++i) {
    Peer* peer = find(peers[i]);
    if (peer == nullptr) continue;
    standings[i].pace = peer->pace;
    if (!is_readable(*peer, now)) continue;
    standings[i].is_connected =
        std::any_of(peer->idle.begin(), peer->idle.end(),
                    [&](const ConnectionPtr& connection) { return leads_to(*peer, *connection); });
    const auto& ways = peer->member.ways;
    standings[i].is_reachable =
        standings[i].is_connected || std::any_of(ways.begin(), ways.end(), [&](size_t way) {
          return now >= peer->ways[way].unusable_until;
        });
  }
  return standings;
}

PeerConnections::ConnectionPtr PeerConnections::take_idle(PeerId id, std::vector<size_t>* candidates) {
  const std::lock_guard lock(mutex_);
  Peer* peer = find(id);
  const auto now = Clock::now();
  if (peer == nullptr || !is_readable(*peer, now)) return nullptr;
  if (ConnectionPtr connection = lend(*peer, [&](const Connection& idle) { return leads_to(*peer, idle); })) {
    connection->is_pulling = false;
    return connection;
  }
  for (const size_t way : peer->member.ways) {
    if (now >= peer->ways[way].unusable_until) candidates->push_back(way);
  }
  return nullptr;
}

PeerConnections::ConnectionPtr PeerConnections::borrow(PeerId id, const Deadline& deadline) {
  std::vector<size_t> candidates;
  ConnectionPtr connection = take_idle(id, &candidates);
  return connection ? connection : connect(id, candidates, deadline);
}

PeerConnections::ConnectionPtr PeerConnections::borrow_idle(PeerId id, bool* is_worth_connecting) {
  std::vector<size_t> candidates;
  ConnectionPtr connection = take_idle(id, &candidates);
  *is_worth_connecting = !candidates.empty();
  return connection;
}

PeerConnections::ConnectionPtr PeerConnections::borrow_over(PeerId id, const Route& route) {
  for (const size_t way : route.ways) {
    ConnectionPtr connection;
    {
      const std::lock_guard lock(mutex_);
      Peer* peer = find(id);
      const Way* here = peer != nullptr ? peer->find(way, route.link) : nullptr;
      if (is_closed_ || here == nullptr) return nullptr;
      connection = lend(*peer, [&](const Connection& idle) {
        return idle.way == way && (idle.link == 0 || idle.link == route.link) && peer->is_usable(idle);
      });
      if (!connection && Clock::now() < here->unusable_until) continue;
    }
    if (!connection) {
      std::optional<Opened> opened = route.open(way);
      if (!opened) return nullptr;
      connection = adopt(id, way, std::move(*opened), route.link);
    }
    if (connection) {
      connection->is_pulling = true;
      return connection;
    }
    if (is_closed()) return nullptr;
    fall_back(id, way, route.link, FallBack::kHandshakeFailed, true);
  }
  return nullptr;
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
    const auto opening = Clock::now();
    if (ConnectionPtr connection = open(id, way, deadline)) {
      connection->pace->note_connected(Clock::now() - opening);
      return connection;
    }
    if (is_closed()) return nullptr;
    if (deadline.passed()) {
      if (deadline.at() - began >= to_clock(timing_.fair_chance)) {
        avoid(id);
        connect_between_calls(id, way);
      }
      return nullptr;
    }
    fall_back(id, way, 0, FallBack::kHandshakeFailed, false);
  }
  return nullptr;
}

PeerConnections::ConnectionPtr PeerConnections::open(PeerId id, size_t way, const Deadline& deadline) {
  return adopt(id, way, hooks_.open(id, way, deadline), 0);
}

PeerConnections::ConnectionPtr PeerConnections::adopt(PeerId id, size_t way, Opened opened, uint64_t link) {
  if (!opened.endpoint) return nullptr;
  auto connection = std::make_shared<Connection>();
  connection->peer = id;
  connection->way = way;
  connection->endpoint = std::move(opened.endpoint);
  connection->remote = std::move(opened.remote);
  connection->link = link;
  {
    const std::lock_guard lock(mutex_);
    const Peer* peer = find(id);
    connection->pace = peer != nullptr ? peer->pace : std::make_shared<Pace>();
    if (!is_closed_) {
      borrowed_.insert(connection);
      return connection;
    }
  }
  connection->endpoint->close();
  return nullptr;
}

std::shared_ptr<Pace> PeerConnections::pace_of(PeerId id) const {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(id);
  return found != peers_.end() ? found->second.pace : nullptr;
}

void PeerConnections::release(const ConnectionPtr& connection, Status worst, ReadAmount amount) {
  const PeerId id = connection->peer;
  std::vector<ConnectionPtr> closing;
  const bool is_worn = connection->endpoint->is_worn();  // then whoever comes next makes a new one
  {
    const std::lock_guard lock(mutex_);
    borrowed_.erase(connection);
    Peer* peer = find(id);
    if (Way* way = peer != nullptr ? peer->find(connection->way, connection->link) : nullptr) {
      if (!connection->is_pulling) {
        way->has_traffic = true;
        way->amount.n_pages += amount.n_pages;
        way->amount.nbytes += amount.nbytes;
        way->amount.seconds += amount.seconds;
        way->amount.n_late += amount.n_late;
      }
      if (!ends_endpoint(worst)) {
        connection->has_read = true;
        if (amount.nbytes > 0) {
          way->n_failures = 0;
          if (connection->link == 0) peer->proven_until = Clock::now() + to_clock(timing_.proven);
        }
        if (!is_closed_ && !is_worn && peer->idle.size() < kMostIdle && peer->keeps(*connection)) {
          connection->idle_since = Clock::now();
          peer->idle.push_back(connection);
          have_idle_swept();
          return;
        }
      } else if (worst == Status::kPeerLost) {
        // Its fellows led to the same: whoever tries again is to find a new one, and not all of them in turn.
        const auto led_there = [&](const Connection& idle) {
          return idle.way == connection->way && idle.link == connection->link;
        };
        take_out(*peer, led_there, &closing);
      }
    }
  }
  connection->endpoint->close();
  close_all(closing);
  const bool is_its_own = connection->link == 0;  // and no link's
  const bool had_its_chance = amount.n_late == 0 && amount.seconds >= timing_.fair_chance;
  if (worst == Status::kTimedOut && had_its_chance && is_its_own) {
    avoid(id);
    if (!connection->has_read) connect_between_calls(id, connection->way);
  } else if (worst == Status::kPeerLost && !connection->has_read) {
    fall_back(id, connection->way, connection->link, FallBack::kConnectionFailed, connection->is_pulling);
  }
}

void PeerConnections::discard(const ConnectionPtr& connection) {
  {
    const std::lock_guard lock(mutex_);
    borrowed_.erase(connection);
  }
  connection->endpoint->close();
}

void PeerConnections::avoid(PeerId id) {
  const std::lock_guard lock(mutex_);
  if (Peer* peer = find(id)) peer->avoid_until = Clock::now() + to_clock(timing_.avoid);
}

void PeerConnections::fall_back(PeerId id, size_t way, uint64_t link, FallBack why, bool is_pulling) {
  uint32_t n_before = 0;
  {
    const std::lock_guard lock(mutex_);
    Peer* peer = find(id);
    Way* failed = peer != nullptr ? peer->find(way, link) : nullptr;
    if (failed == nullptr) return;
    n_before = failed->n_failures++;
    const double seconds = timing_.retry_first * std::exp2(std::min(n_before, 10u));
    failed->unusable_until = Clock::now() + to_clock(std::min(timing_.retry_most, seconds));
  }
  const bool is_first = n_before == 0;
  if (!is_pulling) return hooks_.fell_back(id, way, why, is_first);
  ++n_fallbacks_of_pulls_;
  tell_later(id, way, why, is_first);
}

void PeerConnections::tell_out_of_reach(PeerId id, size_t way, uint64_t link) {
  ++n_fallbacks_of_pulls_;
  {
    const std::lock_guard lock(mutex_);
    Peer* peer = find(id);
    Way* used = peer != nullptr ? peer->find(way, link) : nullptr;
    if (used == nullptr || std::exchange(used->is_told_of, true)) return;
  }
  tell_later(id, way, FallBack::kMemoryOutOfReach, true);
}

// A pull does not wait for the interpreter that this is told to; at the end nobody is told.
void PeerConnections::tell_later(PeerId id, size_t way, FallBack why, bool is_first) {
  start([this, id, way, why, is_first] {
    try {
      hooks_.fell_back(id, way, why, is_first);
    } catch (...) {
      hooks_.failed(std::current_exception());
    }
  });
}

std::vector<PeerConnections::Traffic> PeerConnections::traffic() const {
  const std::lock_guard lock(mutex_);
  std::vector<Traffic> traffic;
  for (const auto& [id, peer] : peers_) {
    for (size_t way = 0; peer.is_member && way < n_ways_; ++way) {
      if (peer.ways[way].has_traffic) traffic.push_back({id.key, way, peer.ways[way].amount});
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

bool PeerConnections::is_closed() const {
  const std::lock_guard lock(mutex_);
  return is_closed_;
}

void PeerConnections::close() {
  interrupt();
  std::vector<ConnectionPtr> idle;
  std::list<Connecting> connecting;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [id, peer] : peers_) idle.insert(idle.end(), peer.idle.begin(), peer.idle.end());
    peers_.clear();
    connecting.splice(connecting.end(), connecting_);
  }
  sweeper_.join();
  for (Connecting& each : connecting) each.thread.join();
  close_all(idle);
}

}  // namespace p2pkv
