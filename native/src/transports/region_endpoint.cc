#include "transports/region_endpoint.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "net/packets.h"

namespace p2pkv {

OwnerDoor make_door(RegionServer& server, uint64_t grant) {
  OwnerDoor door{{}, server.tokens().mint(grant)};
  server.socket_name().copy(door.socket_name, kSocketNameBytes);
  return door;
}

OwnerSocket::~OwnerSocket() {
  if (getpid() == pid_) shutdown(fd_.get(), SHUT_RDWR);
}

bool OwnerSocket::has_hung_up() const {
  pollfd end{fd_.get(), POLLRDHUP, 0};
  return ::poll(&end, 1, 0) != 0;
}

void RegionEndpoint::go_to(const OwnerDoor& door) {
  owner_ = door;
  owner_name_.assign(door.socket_name, strnlen(door.socket_name, kSocketNameBytes));
  advance();
}

std::shared_ptr<RemoteRegion> RegionEndpoint::attach(std::string_view region, std::string* error) {
  RegionBlob blob;
  if (!from_blob(region, rules_.region_magic, &blob, error)) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto remote = make_region(blob.region, blob.nbytes);
  std::erase_if(regions_, [](const auto& known) { return known.expired(); });
  regions_.push_back(remote);
  to_ask_.push_back(remote);
  if (is_bound_ && !is_closed_) advance();
  return remote;
}

RegionEndpoint::Progress RegionEndpoint::poll(AskedRegion& region) {
  const std::lock_guard lock(mutex_);
  if (!region.is_answered && !advance()) return Progress::kLost;
  if (region.is_refused) return Progress::kRefused;
  if (!region.is_answered) return Progress::kWaiting;
  const auto owner = connection();
  return owner && !owner->has_hung_up() ? Progress::kReady : Progress::kLost;
}

void RegionEndpoint::wait_for_owner(const Deadline& deadline) {
  std::shared_ptr<OwnerSocket> owner;
  {
    const std::lock_guard lock(mutex_);
    owner = connection();
  }
  if (owner) {
    pollfd fd{owner->fd(), POLLIN, 0};
    ::poll(&fd, 1, deadline.poll_ms());
  } else {
    // The owner's queue of connections is full, and Unix sockets have no event for its end.
    ::poll(nullptr, 0, std::min(deadline.poll_ms(), 2));
  }
}

bool RegionEndpoint::advance() {
  if (is_severed_ || is_closed_ || is_lost_) return false;
  if (!is_greeted_) {
    const Hello hello{rules_.hello_magic, kFrameVersion, 0, owner_.token};
    if (!greet_owner(owner_name_, hello, &connecting_, &is_greeted_)) return false;
    if (!is_greeted_) return true;
    keep(std::make_shared<OwnerSocket>(std::move(connecting_)));
  }
  const auto owner = connection();
  if (!owner) return false;
  while (!to_ask_.empty()) {
    const RegionRequest request{rules_.request_magic, kFrameVersion, 0, to_ask_.front()->id, 0};
    if (!send_packet(owner->fd(), request)) {
      if (errno == EAGAIN) break;
      return false;
    }
    to_answer_.push_back(std::move(to_ask_.front()));
    to_ask_.pop_front();
  }
  is_lost_ = !take_replies(owner->fd());
  return !is_lost_;
}

bool RegionEndpoint::take_replies(int connection) {
  while (!to_answer_.empty()) {
    bool is_complete = false;
    if (!take_reply(*to_answer_.front(), connection, &is_complete)) return false;
    if (!is_complete) return true;
    to_answer_.front()->is_answered = true;
    to_answer_.pop_front();
  }
  return true;
}

void RegionEndpoint::release() {
  server_.drop_grant(grant_);
  const std::lock_guard lock(mutex_);
  connecting_.reset();
  to_ask_.clear();
  to_answer_.clear();
  for (const auto& known : regions_) {
    if (const auto region = known.lock()) region->let_go();
  }
}

}  // namespace p2pkv
