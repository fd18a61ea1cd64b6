#include "transports/region_server.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>

#include "base/descriptors.h"
#include "net/packets.h"

namespace p2pkv {
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

// A leading zero: the abstract namespace.
socklen_t to_address(const std::string& name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

UniqueFd packet_socket() {
  return UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

UniqueFd listen_on(const std::string& name, std::string* error) {
  UniqueFd listener = packet_socket();
  sockaddr_un address;
  const socklen_t size = to_address(name, &address);
  if (!listener || bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0) {
    *error = std::string("cannot listen on a Unix socket: ") + std::strerror(errno);
    return UniqueFd();
  }
  return listener;
}

}  // namespace

std::string domain_of_host(std::string_view transport, std::string* error) {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  struct stat network{};
  if (boot_id.empty() || stat("/proc/self/ns/net", &network) != 0) {
    *error =
        "cannot tell which host this is: /proc/sys/kernel/random/boot_id or /proc/self/ns/net can't be read";
    return {};
  }
  return std::string(transport) + ":" + boot_id + ":" + std::to_string(network.st_ino) + ":" +
         std::to_string(geteuid());
}

bool greet_owner(const std::string& socket_name, const Hello& hello, UniqueFd* connection, bool* is_greeted) {
  if (!*connection) *connection = packet_socket();
  if (!*connection) return false;
  sockaddr_un address;
  const socklen_t size = to_address(socket_name, &address);
  if (connect(connection->get(), reinterpret_cast<sockaddr*>(&address), size) != 0) return errno == EAGAIN;
  if (!is_own_user(connection->get())) return false;  // an abstract name is anybody's once its owner is dead
  *is_greeted = send_packet(connection->get(), hello);
  return *is_greeted;
}

bool RegionServer::Reader::has(uint32_t region) const {
  return std::find(regions.begin(), regions.end(), region) != regions.end();
}

std::unique_ptr<RegionServer> RegionServer::start(Rules rules, std::shared_ptr<RegionTable> regions,
                                                  std::string* error) {
  auto server = std::unique_ptr<RegionServer>(new RegionServer(std::move(rules), std::move(regions)));
  server->socket_name_ = random_name();
  UniqueFd listener = listen_on(server->socket_name_, error);
  if (!listener) return nullptr;
  RegionServer* self = server.get();
  server->doorman_ = std::make_unique<Doorman>(
      std::move(listener), Doorman::Rules{self->rules_.hello_magic, true, self->rules_.door_thread},
      [self](UniqueFd connection, const Doorman::Admitted& peer) {
        self->admit(std::move(connection), peer.grant);
      });
  if (!server->thread_.start(self->rules_.serving_thread, [self] { self->run(); })) {
    *error = std::string("cannot start the thread ") + self->rules_.serving_thread;
    return nullptr;
  }
  return server->doorman_->start(error) ? std::move(server) : nullptr;
}

void RegionServer::close() {
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
  left_.notify_all();
}

void RegionServer::admit(UniqueFd connection, uint64_t grant) {
  {
    const std::lock_guard lock(mutex_);
    if (is_closing_) return;
    const auto is_doomed = [](const Reader& reader) { return reader.is_doomed; };
    const auto oldest = std::find_if_not(readers_.begin(), readers_.end(), is_doomed);
    if (readers_.end() - oldest >= static_cast<std::ptrdiff_t>(share_of_descriptors(kMaxReaders))) {
      oldest->is_doomed = true;  // `run` takes it away
      shutdown(oldest->connection.get(), SHUT_RDWR);
    }
    readers_.push_back({std::move(connection), grant, {}});
  }
  wake_.set();
}

void RegionServer::drop_grant(uint64_t grant) {
  tokens().revoke(grant);
  const std::lock_guard lock(mutex_);
  for (const Reader& reader : readers_) {
    if (reader.grant == grant) shutdown(reader.connection.get(), SHUT_RDWR);
  }
}

void RegionServer::drop_region(uint32_t region) {
  if (getpid() != pid_) return;
  const std::lock_guard lock(mutex_);
  for (const Reader& reader : readers_) {
    if (reader.has(region)) shutdown(reader.connection.get(), SHUT_RDWR);
  }
}

bool RegionServer::take_back(uint32_t region, const Deadline& deadline) {
  if (getpid() != pid_) return true;
  std::unique_lock lock(mutex_);
  for (Reader& reader : readers_) {
    if (!reader.has(region) || std::exchange(reader.is_leaving, true)) continue;
    shutdown(reader.connection.get(), SHUT_WR);
  }
  const auto has_it = [region](const Reader& reader) { return reader.has(region); };
  const bool is_back = left_.wait_until(
      lock, deadline.at(), [&] { return std::none_of(readers_.begin(), readers_.end(), has_it); });
  for (const Reader& reader : readers_) {
    if (has_it(reader)) shutdown(reader.connection.get(), SHUT_RDWR);
  }
  return is_back;
}

void RegionServer::run() {
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
      left_.notify_all();
    }
  }
}

// Answers one request of a reader. False when the connection is to be closed: hang-up, or a peer that
// misbehaves.
bool RegionServer::answer(size_t index) {
  std::shared_ptr<RegisteredRegion>
      region;  // outlives the lock: its end, if this is its last owner, takes it
  const std::lock_guard lock(mutex_);
  Reader& reader = readers_[index];
  RegionRequest request;
  const ssize_t n = recv(reader.connection.get(), &request, sizeof request, MSG_DONTWAIT | MSG_TRUNC);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  if (reader.is_leaving) return n != 0;
  if (n != sizeof request || request.magic != rules_.request_magic || request.version != kFrameVersion)
    return false;
  region = regions_->find(request.region);
  if (!region) return rules_.answer(reader.connection.get(), request.region, nullptr);
  if (reader.regions.size() >= kMaxRegionsPerReader) return false;
  const RegisteredRegion::Use use(*region);
  if (!use) return rules_.answer(reader.connection.get(), request.region, nullptr);
  reader.regions.push_back(request.region);
  return rules_.answer(reader.connection.get(), request.region, region.get());
}

}  // namespace p2pkv
