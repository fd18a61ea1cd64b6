#include "transports/shm/server.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/descriptors.h"
#include "net/packets.h"
#include "transports/shm/frames.h"

namespace p2pkv::shm {
namespace {

std::string random_name() {
  uint8_t bytes[16];
  fill_random(bytes, sizeof bytes);
  std::string name = "p2pkv-";
  for (const uint8_t byte : bytes) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name;
}

UniqueFd listen_on(const std::string& name, std::string* error) {
  UniqueFd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero: the abstract namespace
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (!listener || bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0) {
    *error = std::string("cannot listen on a Unix socket: ") + std::strerror(errno);
    return UniqueFd();
  }
  return listener;
}

}  // namespace

std::unique_ptr<Server> Server::start(std::shared_ptr<RegionTable> regions, std::string* error) {
  auto server = std::unique_ptr<Server>(new Server(std::move(regions)));
  server->socket_name_ = random_name();
  UniqueFd listener = listen_on(server->socket_name_, error);
  if (!listener) return nullptr;
  Server* self = server.get();
  server->doorman_ = std::make_unique<Doorman>(
      std::move(listener), Doorman::Rules{kHelloMagic, true, "p2pkv-shm-door"},
      [self](UniqueFd connection, uint64_t grant) { self->admit(std::move(connection), grant); });
  if (!server->thread_.start("p2pkv-shm-serve", [self] { self->run(); })) {
    *error = "cannot start a thread for the shm transport";
    return nullptr;
  }
  return server->doorman_->start(error) ? std::move(server) : nullptr;
}

void Server::close() {
  if (getpid() != pid_) return;  // a forked child has none of the threads, and must not touch the connections
  if (doorman_) doorman_->close();
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  wake_.set();
  thread_.join();
  wake_.close();
  const std::lock_guard lock(mutex_);
  readers_.clear();
}

void Server::admit(UniqueFd connection, uint64_t grant) {
  {
    const std::lock_guard lock(mutex_);
    if (is_closing_) return;
    const auto is_doomed = [](const Reader& reader) { return reader.is_doomed; };
    const auto oldest = std::find_if_not(readers_.begin(), readers_.end(), is_doomed);
    if (readers_.end() - oldest >= static_cast<std::ptrdiff_t>(share_of_descriptors(kMaxReaders))) {
      oldest->is_doomed = true;  // `run` takes it away
      shutdown(oldest->connection.get(), SHUT_RDWR);
    }
    readers_.push_back({std::move(connection), grant, {}, false});
  }
  wake_.set();
}

void Server::drop_grant(uint64_t grant) {
  tokens().revoke(grant);
  const std::lock_guard lock(mutex_);
  for (const Reader& reader : readers_) {
    if (reader.grant == grant) shutdown(reader.connection.get(), SHUT_RDWR);
  }
}

void Server::drop_region(uint32_t region) {
  if (getpid() != pid_) return;
  const std::lock_guard lock(mutex_);
  for (const Reader& reader : readers_) {
    const bool has_it =
        std::find(reader.regions.begin(), reader.regions.end(), region) != reader.regions.end();
    if (has_it) shutdown(reader.connection.get(), SHUT_RDWR);
  }
}

void Server::run() {
  std::vector<pollfd> fds;
  for (;;) {
    fds.assign({{wake_.fd(), POLLIN, 0}});
    {
      const std::lock_guard lock(mutex_);
      if (is_closing_) return;
      for (const Reader& reader : readers_) fds.push_back({reader.connection.get(), POLLIN, 0});
    }
    if (poll(fds.data(), fds.size(), -1) < 0 && errno != EINTR) return;
    if (fds[0].revents) wake_.clear();
    // From the back, so that removing a reader moves none that is still to be looked at.
    for (size_t i = fds.size() - 1; i >= 1; --i) {
      if (fds[i].revents == 0 || answer(i - 1)) continue;
      const std::lock_guard lock(mutex_);
      // A forked child may keep it open, and the reader would not see that it is hung up on.
      shutdown(readers_[i - 1].connection.get(), SHUT_RDWR);
      readers_.erase(readers_.begin() + static_cast<std::ptrdiff_t>(i - 1));
    }
  }
}

// Answers one request of a reader. False when the connection is to be closed: hang-up, or a peer that
// misbehaves.
bool Server::answer(size_t index) {
  std::shared_ptr<RegisteredRegion>
      region;  // outlives the lock: its end, if this is its last owner, takes it
  const std::lock_guard lock(mutex_);
  Reader& reader = readers_[index];
  MapRequest request;
  const ssize_t n = recv(reader.connection.get(), &request, sizeof request, MSG_DONTWAIT | MSG_TRUNC);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  if (n != sizeof request || request.magic != kRequestMagic || request.version != kFrameVersion) return false;
  region = regions_->find(request.region);
  MapReply reply{kReplyMagic, static_cast<uint32_t>(MapStatus::kNoSuchRegion), request.region, 0, 0};
  if (!region) return send_packet(reader.connection.get(), reply);
  if (reader.regions.size() >= kMaxRegionsPerReader) return false;
  const RegisteredRegion::Use use(*region);
  if (!use) return send_packet(reader.connection.get(), reply);
  reader.regions.push_back(request.region);
  reply.status = static_cast<uint32_t>(MapStatus::kGranted);
  reply.nbytes = region->nbytes();
  return send_packet(reader.connection.get(), reply, region->fd());
}

}  // namespace p2pkv::shm
