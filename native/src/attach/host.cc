#include "attach/host.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "net/packets.h"
#include "net/tokens.h"

namespace p2pkv::attaching {
namespace {

// How long nobody is let in after a descriptor was lacking: who waits at the door would keep the thread
// awake.
constexpr int kPauseMs = 100;

}  // namespace

Host::Host(UniqueFd listener, const HostParts& parts, NamespaceEpochs& epochs, const Identity& identity,
           const Limits& limits)
    : listener_(std::move(listener)),
      parts_(parts),
      epochs_(epochs),
      identity_(identity),
      limits_{limits.pool_nbytes, std::min(limits.requests, kMostLines), limits.takes_finds},
      shares_(limits.pool_nbytes == 0 ? nullptr
                                      : std::make_unique<EngineShares>(parts.pool, limits.pool_nbytes)) {}

std::shared_ptr<Host> Host::start(UniqueFd listener, const HostParts& parts, NamespaceEpochs& epochs,
                                  const Identity& identity, const Limits& limits, std::string* error) {
  if (parts.pool.index_fd() < 0) {
    *error = "the pool is not one that engines can be shown";
    return nullptr;
  }
  auto host = std::shared_ptr<Host>(new Host(std::move(listener), parts, epochs, identity, limits),
                                    DeleteUnlessForked<Host>());
  host->area_ = SharedRegion::create(area_nbytes<HostArea>(), error);
  if (!host->area_) return nullptr;
  auto* const shown = reinterpret_cast<HostArea*>(host->area_->base());
  shown->most_requests = host->limits_.requests;
  shown->takes_finds = limits.takes_finds ? 1 : 0;
  epochs.show_version(&shown->epochs_version);
  epochs.vigil().show_in(&shown->believed_until, &shown->guests_believed_until);
  Host* self = host.get();
  if (!host->disposer_.start() || !host->thread_.start("p2pkv-attach", [self] { self->run(); })) {
    *error = "cannot start a thread for engines that attach";
    return nullptr;
  }
  return host;
}

void Host::listen_at(UniqueFd listener) {
  {
    const std::lock_guard lock(mutex_);
    next_listener_ = std::move(listener);
  }
  wake_.set();
}

void Host::close() {
  if (getpid() != pid_) return;  // in a forked child all of it is the parent's
  if (is_closing_.exchange(true)) return;
  wake_.set();
  thread_.join();
  shutdown(listener_.get(), SHUT_RDWR);
  std::list<std::shared_ptr<Engine>> engines;
  {
    const std::lock_guard lock(mutex_);
    engines.swap(engines_);
  }
  engines.clear();  // ends the lines
  disposer_.close();
  visitors_.clear();
  epochs_.vigil().show_in(nullptr);
  epochs_.show_version(nullptr);
}

void Host::run() {
  std::vector<pollfd> fds;
  bool is_open = true;
  while (!is_closing_) {
    {
      const std::lock_guard lock(mutex_);
      if (next_listener_) listener_ = std::move(next_listener_);
    }
    const int16_t wanted = is_open ? POLLIN : 0;
    fds.assign({{wake_.fd(), POLLIN, 0}, {listener_.get(), wanted, 0}});
    for (const UniqueFd& visitor : visitors_) fds.push_back({visitor.get(), POLLIN, 0});
    const size_t first_engine = fds.size();
    // Only this thread adds and removes engines, so that it may look at them without the lock.
    for (const auto& engine : engines_) fds.push_back({engine->connection.get(), POLLIN, 0});
    if (poll(fds.data(), fds.size(), is_open ? -1 : kPauseMs) < 0 && errno != EINTR) return;
    if (is_closing_) return;
    if (fds[0].revents != 0) wake_.clear();
    size_t next = first_engine;
    for (auto engine = engines_.begin(); engine != engines_.end(); ++next) {
      const bool is_over = fds[next].revents != 0 && !hear(**engine);
      const auto current = engine++;
      if (!is_over) continue;
      if (shares_) shares_->leave((*current)->parts.share);
      finds_.forget((*current)->number);
      disposer_.take(*current);
      const std::lock_guard lock(mutex_);
      engines_.erase(current);
    }
    for (size_t i = first_engine - 1; i >= 2; --i) {
      const auto visitor = visitors_.begin() + static_cast<ptrdiff_t>(i - 2);
      if (fds[i].revents == 0) continue;
      UniqueFd connection = std::move(*visitor);
      visitors_.erase(visitor);
      if (!greet(&connection)) ++n_refused_;
    }
    reap();
    is_open = fds[1].revents == 0 || let_in();
  }
}

bool Host::let_in() {
  UniqueFd connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!connection) return errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM;
  if (!is_own_user(connection.get())) {
    ++n_refused_;
    return true;
  }
  if (visitors_.size() >= kMostVisitors) {
    visitors_.erase(visitors_.begin());
    ++n_refused_;
  }
  visitors_.push_back(std::move(connection));
  return true;
}

bool Host::greet(UniqueFd* connection) {
  Hello hello;
  UniqueFd area;
  if (receive_packet(connection->get(), &hello, &area) != Received::kPacket || hello.magic != kHelloMagic) {
    return false;
  }
  if (hello.version != kVersion) {
    refuse(connection->get(), Refusal::kVersion);
    return false;
  }
  if (hello.purpose == static_cast<uint16_t>(Purpose::kEngine)) return admit_engine(connection, hello.engine);
  if (hello.purpose == static_cast<uint16_t>(Purpose::kVisit)) {
    Welcome answer = welcome(Engine{});
    answer.engine = kMostEngines - engines_.size();
    return send_packet(connection->get(), answer);
  }
  if (hello.purpose != static_cast<uint16_t>(Purpose::kLine)) return false;
  return admit_line(connection, hello, std::move(area));
}

void Host::refuse(int connection, Refusal why) {
  send_packet(connection, Welcome{kWelcomeMagic, kVersion, static_cast<uint16_t>(why), 0, 0, 0, {}, {}});
}

Welcome Host::welcome(const Engine& engine) const {
  Welcome welcome{kWelcomeMagic, kVersion, 0, engine.number, engine.secret, identity_.node_key, {}, {}};
  identity_.address.copy(welcome.address, kAddressBytes - 1);
  identity_.cluster.copy(welcome.cluster, kClusterBytes - 1);
  return welcome;
}

bool Host::admit_engine(UniqueFd* connection, uint64_t mark) {
  if (engines_.size() >= kMostEngines) {
    refuse(connection->get(), Refusal::kTooMany);
    return false;
  }
  const auto engine = std::make_shared<Engine>();
  engine->connection = std::move(*connection);
  engine->number = next_number_++;
  engine->parts.memories = std::make_shared<EngineMemories>();
  engine->parts.turns = std::make_shared<Turns>(limits_.requests);
  engine->parts.number = engine->number;
  if (limits_.takes_finds) engine->parts.finds = &finds_;
  fill_random(&engine->secret, sizeof engine->secret);
  if (!send_packet(engine->connection.get(), welcome(*engine), area_->fd())) return false;
  if (!show_pool(engine->connection.get())) return false;
  if (shares_) engine->parts.share = shares_->open(mark);
  const std::lock_guard lock(mutex_);
  engines_.push_back(engine);
  return true;
}

bool Host::show_pool(int connection) const {
  const int parts[kPoolParts] = {parts_.pool.index_fd(), parts_.pool.records_fd(), parts_.pool.region().fd()};
  for (uint32_t part = 0; part < kPoolParts; ++part) {
    const UniqueFd fd = for_readers(parts[part]);
    if (!fd || !send_packet(connection, ShownPart{kPoolMagic, part}, fd.get())) return false;
  }
  return true;
}

bool Host::admit_line(UniqueFd* connection, const Hello& hello, UniqueFd area) {
  const auto found = std::find_if(engines_.begin(), engines_.end(), [&](const auto& one) {
    return one->number == hello.engine && one->secret == hello.secret;
  });
  if (found == engines_.end()) {
    refuse(connection->get(), Refusal::kUnknownEngine);
    return false;
  }
  Engine& engine = **found;
  std::erase_if(engine.awaited, [](const auto& one) { return has_hung_up(one.connection.get()); });
  // One that its engine has closed may still be at work, or its thread not have had its turn; its successor
  // is let in all the same.
  const auto n_left = std::count_if(engine.lines.begin(), engine.lines.end(),
                                    [](const auto& line) { return line->is_left(); });
  const size_t n_lines = engine.lines.size();
  if (n_lines - static_cast<size_t>(n_left) + engine.awaited.size() >= kMostLines) {
    refuse(connection->get(), Refusal::kTooMany);
    return false;
  }
  if (n_lines < 2 * kMostLines) return open_line(engine, connection, area.get());
  // Closed ones end by themselves, so it waits for one of them, for as long as its engine does.
  engine.awaited.push_back({std::move(*connection), std::move(area)});
  return true;
}

bool Host::open_line(Engine& engine, UniqueFd* connection, int area) {
  if (has_hung_up(connection->get())) return true;  // its engine's time was over
  Refusal refusal = Refusal::kNone;
  auto line = HostLine::open(connection, area, engine.parts, parts_, counts_, &refusal);
  if (!line) {
    refuse(connection->get(), refusal);
    return false;
  }
  if (!send_packet(line->connection(), welcome(engine), line->answer_fd())) return false;
  if (!line->start(is_draining_, [this] { wake_.set(); })) return false;
  const std::lock_guard lock(mutex_);
  engine.lines.push_back(std::move(line));
  return true;
}

void Host::open_awaited(Engine& engine) {
  while (!engine.awaited.empty() && engine.lines.size() < 2 * kMostLines) {
    AwaitedLine next = std::move(engine.awaited.front());
    engine.awaited.pop_front();
    if (!open_line(engine, &next.connection, next.area.get())) ++n_refused_;
  }
}

bool Host::hear(Engine& engine) {
  MemoryRequest request;
  UniqueFd memory;
  const Received received = receive_packet(engine.connection.get(), &request, &memory);
  if (received == Received::kNothing) return true;
  if (received != Received::kPacket || request.magic != kMemoryMagic) {
    if (received != Received::kEnd) ++n_refused_;
    return false;
  }
  if (request.change != static_cast<uint32_t>(MemoryChange::kAdd)) {
    // nobody waits for word of that, and unread ones would fill the socket
    disposer_.take(engine.parts.memories->forget(request.memory));
    return true;
  }
  MemoryReply reply{kReplyMagic, request.memory, 0, 0};
  reply.status =
      static_cast<uint32_t>(engine.parts.memories->add(request.memory, memory.get(), request.nbytes));
  return send_packet(engine.connection.get(), reply);
}

// Takes lines away that have ended: their engine closed them, or said what no engine says. Those that waited
// for it are let in.
void Host::reap() {
  std::list<std::unique_ptr<HostLine>> gone;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& engine : engines_) {
      for (auto line = engine->lines.begin(); line != engine->lines.end();) {
        const auto current = line++;
        if ((*current)->has_ended()) gone.splice(gone.end(), engine->lines, current);
      }
    }
  }
  for (const auto& engine : engines_) open_awaited(*engine);
}

Host::Stats Host::stats() {
  const ShareStats of_shares = parts_.pool.share_stats();
  Stats stats{0,
              0,
              0,
              n_refused_ + counts_.n_refused,
              counts_.n_requests,
              counts_.n_withdrawn,
              counts_.n_stored_pages,
              counts_.n_stored_bytes,
              shares_ ? shares_->largest_charge() : 0,
              of_shares.evicted_pages,
              of_shares.refused_pages};
  const std::lock_guard lock(mutex_);
  for (const auto& engine : engines_) {
    ++stats.engines;
    stats.lines += engine->lines.size();
    stats.memory_bytes += engine->parts.memories->nbytes();
  }
  return stats;
}

}  // namespace p2pkv::attaching
