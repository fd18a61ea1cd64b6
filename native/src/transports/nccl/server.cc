#include "transports/nccl/server.h"

#include <cstring>
#include <utility>

namespace p2pkv::nccl {

std::unique_ptr<Server> Server::start(const ListenAt& at, Means* means, std::shared_ptr<RegionTable> regions,
                                      std::string* error) {
  auto server = std::unique_ptr<Server>(new Server(means, std::move(regions)));
  return server->door_.start(at, error) ? std::move(server) : nullptr;
}

void Server::close() {
  if (getpid() != pid_) return;  // a forked child has none of the threads to wait for
  door_.close();
  std::unique_lock lock(mutex_);
  is_closing_ = true;
  for (Served& served : served_) served.session.stop();
  emptied_.wait(lock, [this] { return served_.empty(); });
  last_to_leave_.join();
}

std::string Server::make_half(const Instance& instance, std::string* error) {
  const std::string door = door_.accept(ask_for_door(kDoor), error);
  if (door.size() != sizeof(DoorBlob)) return {};
  EndpointBlob half{kEndpointMagic, kFrameVersion, 0, instance, {}};
  std::memcpy(&half.door, door.data(), sizeof half.door);
  return to_blob(half);
}

// A reader has one line, and so one session at a time; what is over the budget is turned away in there.
void Server::admit(SealedStream stream) {
  const std::lock_guard lock(mutex_);
  const size_t most = 2 * static_cast<size_t>(means_->budget.most());
  if (is_closing_ || served_.size() >= most) return;
  served_.emplace_front(std::move(stream), means_, regions_);
  const auto served = served_.begin();
  if (!served->thread.start("p2pkv-nccl-out", [this, served] { serve(served); })) served_.pop_front();
}

void Server::serve(std::list<Served>::iterator served) {
  {
    const std::lock_guard lock(mutex_);  // admit() has stored the thread before it lets this through
  }
  served->session.serve();
  NamedThread before;
  const std::lock_guard lock(mutex_);
  before = std::move(last_to_leave_);
  before.join();  // it has left this function's lock, and so ends at once
  last_to_leave_ = std::move(served->thread);
  served_.erase(served);
  if (served_.empty()) emptied_.notify_all();
}

}  // namespace p2pkv::nccl
