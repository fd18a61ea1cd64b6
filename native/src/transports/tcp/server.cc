#include "transports/tcp/server.h"

#include <sys/socket.h>

#include "base/descriptors.h"
#include "transports/tcp/session.h"

namespace p2pkv::tcp {
std::unique_ptr<Server> Server::start(const std::vector<ListenAt>& at, std::shared_ptr<RegionTable> regions,
                                      std::shared_ptr<Sealing> sealing, std::string* error) {
  auto server = std::unique_ptr<Server>(new Server(std::move(regions), std::move(sealing)));
  std::vector<UniqueFd> listeners;
  for (const ListenAt& one : at) {
    listeners.push_back(listen_on(one, &server->addresses_.emplace_back(), error));
    if (!listeners.back()) return nullptr;
  }
  Server* self = server.get();
  server->doorman_ = std::make_unique<Doorman>(
      std::move(listeners), Doorman::Rules{kHelloMagic, false, "p2pkv-tcp-door"},
      [self](UniqueFd fd, const Doorman::Admitted& peer) { self->admit(std::move(fd), peer); });
  return server->doorman_->start(error) ? std::move(server) : nullptr;
}

void Server::close() {
  if (getpid() != pid_) return;  // a forked child has none of the threads to wait for
  if (doorman_) doorman_->close();
  stop_.set();
  std::unique_lock lock(mutex_);
  is_closing_ = true;
  emptied_.wait(lock, [this] { return connections_.empty(); });
  last_to_leave_.join();
  stop_.close();
}

void Server::drop_grant(uint64_t grant) {
  tokens().revoke(grant);
  const std::lock_guard lock(mutex_);
  for (const Connection& connection : connections_) {
    if (connection.grant == grant) shutdown(connection.fd.get(), SHUT_RDWR);
  }
}

void Server::admit(UniqueFd fd, const Doorman::Admitted& peer) {
  set_liveness(fd.get());
  auto wire = sealing_ ? sealing_->wire(peer.secret, peer.hello, Sender::kOwner) : plain_wire();
  const std::lock_guard lock(mutex_);
  if (is_closing_) return;
  make_room();
  connections_.emplace_front(std::move(fd), peer.grant, std::move(wire));
  const auto connection = connections_.begin();
  if (!connection->thread.start("p2pkv-tcp-serve", [this, connection] { serve(connection); })) {
    connections_.pop_front();
  }
}

// With the lock. The thread of the one that is hung up on takes it off the list.
void Server::make_room() {
  size_t n_doomed = 0;
  Connection* oldest = nullptr;
  for (Connection& connection : connections_) {
    n_doomed += connection.is_doomed ? 1 : 0;
    if (connection.is_doomed || (oldest != nullptr && oldest->used_ns <= connection.used_ns)) continue;
    oldest = &connection;
  }
  if (oldest == nullptr || connections_.size() - n_doomed < share_of_descriptors(kMaxConnections)) return;
  oldest->is_doomed = true;
  shutdown(oldest->fd.get(), SHUT_RDWR);
}

void Server::serve(std::list<Connection>::iterator connection) {
  int fd;
  {
    const std::lock_guard lock(mutex_);  // admit() has stored the thread before it lets this through
    fd = connection->fd.get();
  }
  Session(fd, stop_.fd(), std::move(connection->wire), regions_, &connection->used_ns).serve();
  shutdown(fd, SHUT_RDWR);  // a forked child may keep it open, and the reader would wait for nobody

  NamedThread before;
  const std::lock_guard lock(mutex_);
  before = std::move(last_to_leave_);
  before.join();  // it has left this function's lock, and so ends at once
  last_to_leave_ = std::move(connection->thread);
  connections_.erase(connection);
  if (connections_.empty()) emptied_.notify_all();
}

}  // namespace p2pkv::tcp
