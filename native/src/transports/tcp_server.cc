#include "tcp_server.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "tcp_session.h"

namespace p2pkv::tcp {
namespace {

struct Resolved {
  sockaddr_storage storage{};
  socklen_t size = 0;
};

bool resolve(const std::string& host, uint16_t port, Resolved* resolved, std::string* error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (rc != 0) {
    *error = "cannot resolve '" + host + "': " + gai_strerror(rc);
    return false;
  }
  std::memcpy(&resolved->storage, found->ai_addr, found->ai_addrlen);
  resolved->size = found->ai_addrlen;
  freeaddrinfo(found);
  return true;
}

Address to_address(const Resolved& resolved) {
  Address address;
  if (resolved.storage.ss_family == AF_INET6) {
    const auto& in6 = reinterpret_cast<const sockaddr_in6&>(resolved.storage);
    address.family = 6;
    address.port = ntohs(in6.sin6_port);
    address.scope = in6.sin6_scope_id;
    std::memcpy(address.bytes, &in6.sin6_addr, 16);
  } else {
    const auto& in4 = reinterpret_cast<const sockaddr_in&>(resolved.storage);
    address.port = ntohs(in4.sin_port);
    std::memcpy(address.bytes, &in4.sin_addr, 4);
  }
  return address;
}

bool is_wildcard(const Address& address) {
  for (const uint8_t byte : address.bytes) {
    if (byte != 0) return false;
  }
  return true;
}

// A reader's host that vanishes without a word is noticed within about 20 s.
void set_liveness(int fd) {
  const auto set = [fd](int option, int value) { setsockopt(fd, IPPROTO_TCP, option, &value, sizeof value); };
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  set(TCP_NODELAY, 1);
  set(TCP_KEEPIDLE, 5);
  set(TCP_KEEPINTVL, 5);
  set(TCP_KEEPCNT, 3);
  set(TCP_USER_TIMEOUT, 20000);
}

}  // namespace

std::unique_ptr<Server> Server::start(const std::string& host, uint16_t port, const std::string& advertise,
                                      std::shared_ptr<RegionTable> regions, std::string* error) {
  auto server = std::unique_ptr<Server>(new Server(std::move(regions)));
  UniqueFd listener;
  if (!server->listen_on(host, port, advertise, &listener, error)) return nullptr;
  Server* self = server.get();
  server->doorman_ =
      std::make_unique<Doorman>(std::move(listener), Doorman::Rules{kHelloMagic, false, "p2pkv-tcp-door"},
                                [self](UniqueFd fd, uint64_t grant) { self->admit(std::move(fd), grant); });
  return server->doorman_->start(error) ? std::move(server) : nullptr;
}

bool Server::listen_on(const std::string& host, uint16_t port, const std::string& advertise,
                       UniqueFd* listener, std::string* error) {
  Resolved local;
  if (!resolve(host, port, &local, error)) return false;
  *listener = UniqueFd(socket(local.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  setsockopt(listener->get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(listener->get(), reinterpret_cast<sockaddr*>(&local.storage), local.size) != 0 ||
      listen(listener->get(), SOMAXCONN) != 0 ||
      getsockname(listener->get(), reinterpret_cast<sockaddr*>(&local.storage), &local.size) != 0) {
    *error = "cannot listen on " + host + ":" + std::to_string(port) + ": " + std::strerror(errno);
    return false;
  }
  address_ = to_address(local);
  if (!advertise.empty()) {
    Resolved told;
    if (!resolve(advertise, address_.port, &told, error)) return false;
    address_ = to_address(told);
  }
  if (is_wildcard(address_)) {
    *error = "peers can't connect to '" + host + "': give an address of this host, or one to advertise";
    return false;
  }
  return true;
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

void Server::admit(UniqueFd fd, uint64_t grant) {
  set_liveness(fd.get());
  const std::lock_guard lock(mutex_);
  if (is_closing_ || connections_.size() >= kMaxConnections) return;
  connections_.push_front({std::move(fd), grant, {}});
  const auto connection = connections_.begin();
  if (!connection->thread.start("p2pkv-tcp-serve", [this, connection] { serve(connection); })) {
    connections_.pop_front();
  }
}

void Server::serve(std::list<Connection>::iterator connection) {
  int fd;
  {
    const std::lock_guard lock(mutex_);  // admit() has stored the thread before it lets this through
    fd = connection->fd.get();
  }
  Session(fd, stop_.fd(), regions_).serve();

  NamedThread before;
  const std::lock_guard lock(mutex_);
  before = std::move(last_to_leave_);
  before.join();  // it has left this function's lock, and so ends at once
  last_to_leave_ = std::move(connection->thread);
  connections_.erase(connection);
  if (connections_.empty()) emptied_.notify_all();
}

}  // namespace p2pkv::tcp
