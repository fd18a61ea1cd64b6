#include "offers/link_server.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

namespace p2pkv::offers {
namespace {

constexpr int kTickMs = 50;
constexpr int kEventsPerWait = 64;
// Of one peer; then the others get theirs.
constexpr size_t kMessagesPerTurn = 64;
constexpr uint64_t kStop = 0;

bool is_message(const wire::Header& header) {
  return header.magic == wire::kMagic && header.version == wire::kVersion;
}

}  // namespace

LinkServer::LinkServer(Listener listener)
    : listener_(std::move(listener)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      door_(kLinkDoor,
            [this](SealedStream stream) { add(std::make_unique<SealedStream>(std::move(stream)), {}); }),
      next_id_(kStop + 1) {}

bool LinkServer::start(const ListenAt& at, std::string* error) {
  watch(stop_.fd(), kStop, EPOLL_CTL_ADD, EPOLLIN);
  if (!door_.start(at, error)) return false;
  if (thread_.start("p2pkv-links", [this] { run(); })) return true;
  *error = "cannot start a thread for links";
  return false;
}

void LinkServer::close() {
  if (getpid() != pid_) return;  // a forked child has none of the threads to wait for
  const std::lock_guard closing(closing_);
  door_.close();
  stop_.set();
  thread_.join();
  std::map<uint64_t, std::shared_ptr<Link>> links;
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
    links.swap(links_);
  }
  for (const auto& [id, link] : links) {
    link->cut();
    listener_.lost(link);
  }
}

std::string LinkServer::accept(std::string_view remote, std::string* error) {
  return door_.accept(remote, error);
}

std::shared_ptr<Link> LinkServer::connect(std::string_view door, const IntroduceRecord& own, PeerId peer,
                                          const Deadline& deadline, std::string* error) {
  auto stream = knock(kLinkDoor, door, error);
  if (!stream) return nullptr;
  std::string head;
  wire::append(
      head, wire::Header{wire::kMagic, wire::kVersion, static_cast<uint16_t>(Kind::kIntroduce), 0, 0, 1, 0});
  stream->put(head, to_blob(own));
  const auto progress = receive_by(*stream, deadline);
  if (progress != SealedStream::Progress::kFrame) {
    *error = progress == SealedStream::Progress::kLost ? "it hung up or refused" : "it does not answer";
    return nullptr;
  }
  wire::Reader answer(stream->message());
  const auto header = answer.value<wire::Header>();
  if (!header || !is_message(*header) || header->status != static_cast<uint32_t>(wire::ReplyStatus::kOk)) {
    *error = "it speaks another version, or is no member yet";
    return nullptr;
  }
  auto link = add(std::move(stream), peer);
  if (!link) *error = "this node is closing";
  return link;
}

std::shared_ptr<Link> LinkServer::find(uint64_t node_key) {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, link] : links_) {
    if (link->node_key() == node_key && !link->is_lost()) return link;
  }
  return nullptr;
}

size_t LinkServer::n_links() {
  const std::lock_guard lock(mutex_);
  return links_.size();
}

std::vector<std::shared_ptr<Link>> LinkServer::all() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Link>> links;
  for (const auto& [id, link] : links_) {
    if (link->node_key() != 0) links.push_back(link);
  }
  return links;
}

void LinkServer::hang_up_after(PeerId peer, double seconds) {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, link] : links_) {
    if (link->peer() != peer) continue;
    if (seconds > 0) {
      doomed_.emplace(id, Deadline::after(seconds));  // the first word counts
    } else {
      link->cut();  // the server finds its end
    }
  }
}

void LinkServer::keep(PeerId peer) {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, link] : links_) {
    if (link->peer() == peer) doomed_.erase(id);
  }
}

void LinkServer::hang_up_on_doomed() {
  const std::lock_guard lock(mutex_);
  std::erase_if(doomed_, [&](const auto& doomed) {
    if (!doomed.second.passed()) return false;
    const auto link = links_.find(doomed.first);
    if (link != links_.end()) link->second->cut();
    return true;
  });
}

void LinkServer::watch(int fd, uint64_t id, int operation, uint32_t events) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  epoll_ctl(epoll_.get(), operation, fd, &event);
}

std::shared_ptr<Link> LinkServer::add(std::unique_ptr<SealedStream> stream, PeerId peer) {
  const std::lock_guard lock(mutex_);
  if (is_closing_ || links_.size() >= kMaxLinks) return nullptr;
  const uint64_t id = next_id_++;
  auto link = std::make_shared<Link>(id, std::move(stream), [this](Link& blocked) {
    watch(blocked.fd(), blocked.id(), EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
  });
  link->introduce(peer);
  links_.emplace(id, link);
  // With room to send, so that the server looks at once: `connect` may have received more than the answer.
  watch(link->fd(), id, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT);
  return link;
}

std::shared_ptr<Link> LinkServer::at(uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = links_.find(id);
  return found == links_.end() ? nullptr : found->second;
}

void LinkServer::run() {
  std::array<epoll_event, kEventsPerWait> events;
  Deadline next_tick = Deadline::after(kTickMs / 1e3);
  for (;;) {
    const int n = epoll_wait(epoll_.get(), events.data(), kEventsPerWait, next_tick.poll_ms());
    if (n < 0 && errno != EINTR) return;
    for (int i = 0; i < n; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      if (event.data.u64 == kStop) return;
      if (const auto link = at(event.data.u64)) serve(link, event.events);
    }
    if (next_tick.passed()) {
      hang_up_on_doomed();
      listener_.tick();
      next_tick = Deadline::after(kTickMs / 1e3);
    }
  }
}

void LinkServer::serve(const std::shared_ptr<Link>& link, uint32_t events) {
  bool is_blocked = false;
  if ((events & EPOLLOUT) != 0) {
    if (!link->send_rest(&is_blocked)) return hang_up(link);
    if (!is_blocked) {
      watch(link->fd(), link->id(), EPOLL_CTL_MOD, EPOLLIN);
      // Looked at again: somebody may have been blocked, and asked for this event, just before it was given
      // up.
      if (!link->send_rest(&is_blocked)) return hang_up(link);
      if (is_blocked) watch(link->fd(), link->id(), EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
    }
  }
  std::string message;
  bool is_lost = false;
  bool is_drained = false;
  for (size_t n = 0; n < kMessagesPerTurn && !is_drained; ++n) {
    if (!link->receive(&message, &is_lost)) {
      is_drained = true;
    } else if (!hear(link, message)) {
      is_lost = true;
      is_drained = true;
    }
  }
  if (is_lost || link->is_lost()) return hang_up(link);
  // What has been received already does not show in epoll: room to send brings it back at once.
  if (!is_drained) watch(link->fd(), link->id(), EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
}

bool LinkServer::hear(const std::shared_ptr<Link>& link, const std::string& message) {
  wire::Reader body(message);
  const auto header = body.value<wire::Header>();
  return header && is_message(*header) && listener_.heard(link, *header, body);
}

void LinkServer::hang_up(const std::shared_ptr<Link>& link) {
  {
    const std::lock_guard lock(mutex_);
    if (links_.erase(link->id()) == 0) return;
    doomed_.erase(link->id());
  }
  // Others may keep it for a while, and with it the descriptor, which would go on to report its end.
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link->fd(), nullptr);
  link->cut();
  listener_.lost(link);
}

}  // namespace p2pkv::offers
