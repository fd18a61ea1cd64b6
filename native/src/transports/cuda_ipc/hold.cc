#include "transports/cuda_ipc/hold.h"

#include <sys/epoll.h>

#include <array>
#include <cerrno>

namespace p2pkv::cuda_ipc {
namespace {

constexpr uint64_t kStop = 0;

void add_to(int epoll, int fd, uint64_t id, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
}

}  // namespace

std::shared_ptr<OwnerSocket> Hold::connection() {
  const std::lock_guard lock(mutex_);
  return connection_;
}

std::shared_ptr<Mapped> Hold::find(uint32_t region, int device) {
  const std::lock_guard lock(mutex_);
  const auto found = mappings_.find({region, device});
  return found == mappings_.end() ? nullptr : found->second;
}

std::shared_ptr<Mapped> Hold::keep(uint32_t region, int device, std::unique_ptr<cuda::MappedMemory> memory) {
  auto mapped = std::make_shared<Mapped>();
  mapped->memory = std::move(memory);
  const std::lock_guard lock(mutex_);
  if (!connection_) return nullptr;
  mapped->connection = connection_;
  mappings_[{region, device}] = mapped;
  return mapped;
}

void Hold::let_go() {
  // They go after the lock: the driver takes its time. And the connection last.
  std::shared_ptr<OwnerSocket> connection;
  Mappings mappings;
  const std::lock_guard lock(mutex_);
  connection.swap(connection_);
  mappings.swap(mappings_);
}

bool HangUps::start(std::string* error) {
  epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  add_to(epoll_.get(), stop_.fd(), kStop, EPOLLIN);
  if (epoll_ && thread_.start("p2pkv-ipc-ends", [this] { run(); })) return true;
  *error = "cannot start a thread for the cuda_ipc transport";
  return false;
}

void HangUps::close() {
  stop_.set();
  thread_.join();
  const std::lock_guard lock(mutex_);
  epoll_.reset();
  stop_.close();
}

void HangUps::watch(const std::shared_ptr<Hold>& hold) {
  const auto connection = hold->connection();
  if (!connection) return;
  const std::lock_guard lock(mutex_);
  if (!epoll_) return;  // closed
  std::erase_if(holds_, [](const auto& known) { return known.second.expired(); });
  const uint64_t id = ++last_id_;
  holds_[id] = hold;
  // A closed descriptor is forgotten by itself; of one that a forked child has too, an event comes once.
  add_to(epoll_.get(), connection->fd(), id, EPOLLRDHUP | EPOLLONESHOT);
}

void HangUps::run() {
  std::array<epoll_event, 16> events;
  for (;;) {
    const int n = epoll_wait(epoll_.get(), events.data(), events.size(), -1);
    if (n < 0 && errno != EINTR) return;
    for (int i = 0; i < n; ++i) {
      const uint64_t id = events[static_cast<size_t>(i)].data.u64;
      if (id == kStop) return;
      std::shared_ptr<Hold> hold;
      {
        const std::lock_guard lock(mutex_);
        const auto found = holds_.find(id);
        if (found == holds_.end()) continue;
        hold = found->second.lock();
        holds_.erase(found);
      }
      if (hold) hold->let_go();
    }
  }
}

}  // namespace p2pkv::cuda_ipc
