#include "directory/server.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/descriptors.h"
#include "base/zmq_api.h"
#include "directory/requests.h"
#include "net/doorman.h"
#include "net/listener.h"
#include "net/sealed_door.h"
#include "net/sealed_stream.h"

namespace p2pkv {
namespace {

constexpr int kEventsPerWait = 64;
// Of one peer; then the others get theirs.
constexpr size_t kRequestsPerTurn = 16;

// What epoll says is ready: one of these two, or the id of a channel.
constexpr uint64_t kStop = 0;
constexpr uint64_t kReplies = 1;

struct Channel {
  uint64_t id;
  SealedStream stream;
  uint32_t events = EPOLLIN;  // that it waits for
  bool is_promoting = false;  // its question is not answered yet, and no other one is heard
  bool is_doomed = false;     // hung up on for another's sake
  Deadline::Clock::time_point used = Deadline::Clock::now();  // when it asked last
};

class EpollDirectoryServer final : public DirectoryServer {
 public:
  explicit EpollDirectoryServer(std::shared_ptr<Shard> shard) : shard_(std::move(shard)) {}
  ~EpollDirectoryServer() override { close(); }

  bool start(const ListenAt& at, std::string* error) {
    watch(stop_.fd(), kStop, EPOLL_CTL_ADD, EPOLLIN);
    watch(replied_.fd(), kReplies, EPOLL_CTL_ADD, EPOLLIN);
    if (!door_.start(at, error)) return false;
    if (thread_.start("p2pkv-directory", [this] { run(); })) return true;
    *error = "cannot start a thread for the directory";
    return false;
  }

  void announce(uint64_t boot) override { boot_ = boot; }

  void serve_promotions(std::shared_ptr<Promoter> promoter) override {
    const std::lock_guard lock(mutex_);
    promoter_ = std::move(promoter);
  }

  void serve_touches(Touch touch) override {
    const std::lock_guard lock(mutex_);
    touch_ = std::make_shared<const Touch>(std::move(touch));
  }

  std::string accept(std::string_view remote, std::string* error) override {
    return door_.accept(remote, error);
  }

  Stats stats() override {
    const std::lock_guard lock(mutex_);
    return {n_requests_, channels_.size(), n_touched_};
  }

  void close() override {
    if (getpid() != pid_) return;  // a forked child has none of the threads to wait for
    const std::lock_guard closing(closing_);
    door_.close();
    stop_.set();
    thread_.join();
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
    for (const auto& [id, channel] : channels_) channel->stream.shut_down();
    channels_.clear();
    replies_.clear();
  }

 private:
  void watch(int fd, uint64_t id, int operation, uint32_t events) const {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    epoll_ctl(epoll_.get(), operation, fd, &event);
  }

  void admit(SealedStream stream) {
    const int fd = stream.fd();
    const std::lock_guard lock(mutex_);
    if (is_closing_) return;
    make_room();
    const uint64_t id = next_id_++;
    channels_.emplace(id, std::make_unique<Channel>(Channel{id, std::move(stream)}));
    watch(fd, id, EPOLL_CTL_ADD, EPOLLIN);
  }

  // With the lock. Whoever asked longest ago makes room; the server's thread finds it ended.
  void make_room() {
    size_t n_doomed = 0;
    Channel* oldest = nullptr;
    for (const auto& [id, channel] : channels_) {
      n_doomed += channel->is_doomed ? 1 : 0;
      if (channel->is_doomed || (oldest != nullptr && oldest->used <= channel->used)) continue;
      oldest = channel.get();
    }
    if (oldest == nullptr || channels_.size() - n_doomed < share_of_descriptors(kMaxChannels)) return;
    oldest->is_doomed = true;
    oldest->stream.shut_down();
  }

  void run() {
    std::array<epoll_event, kEventsPerWait> events;
    for (;;) {
      const int n = epoll_wait(epoll_.get(), events.data(), kEventsPerWait, -1);
      if (n < 0 && errno != EINTR) return;
      for (int i = 0; i < n; ++i) {
        const epoll_event& event = events[static_cast<size_t>(i)];
        if (event.data.u64 == kStop) return;
        if (event.data.u64 == kReplies) {
          send_replies();
        } else if (Channel* channel = find(event.data.u64)) {
          if (!serve(*channel, event.events)) hang_up(channel->id);
        }
      }
    }
  }

  // Channels are erased by the thread that calls this alone.
  Channel* find(uint64_t id) {
    const std::lock_guard lock(mutex_);
    const auto found = channels_.find(id);
    return found == channels_.end() ? nullptr : found->second.get();
  }

  void hang_up(uint64_t id) {
    std::unique_lock lock(mutex_);
    const auto channel = channels_.find(id);
    channel->second->stream.shut_down();
    // A forked child may keep the connection open: closing it here would not end its events.
    watch(channel->second->stream.fd(), id, EPOLL_CTL_DEL, 0);
    channels_.erase(channel);
    const std::shared_ptr<Promoter> promoter = promoter_;
    lock.unlock();
    if (promoter) promoter->leave(id);  // nobody is there any more to read what was promoted
  }

  // Answers what has come. False: hang up.
  bool serve(Channel& channel, uint32_t events) {
    if (channel.is_promoting && (events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) != 0) return false;
    SealedStream& stream = channel.stream;
    if (!stream.flush()) return false;
    size_t n_answered = 0;
    // A peer that does not read its answers is not heard: it costs the memory of one, and others nothing.
    while (n_answered < kRequestsPerTurn && !stream.has_outgoing() && !channel.is_promoting) {
      const auto progress = stream.receive();
      if (progress == SealedStream::Progress::kLost) return false;
      if (progress == SealedStream::Progress::kBlocked) break;
      if (!answer(channel) || !stream.flush()) return false;
      ++n_answered;
    }
    // Requests beyond its turn may have been received already: there is room to send, so epoll comes back at
    // once.
    const bool awaits_room = stream.has_outgoing() || n_answered == kRequestsPerTurn;
    await(channel, awaits_room ? EPOLLOUT : channel.is_promoting ? EPOLLRDHUP : EPOLLIN);
    return true;
  }

  void await(Channel& channel, uint32_t events) const {
    if (channel.events == events) return;
    channel.events = events;
    watch(channel.stream.fd(), channel.id, EPOLL_CTL_MOD, events);
  }

  bool answer(Channel& channel) {
    wire::Reader body(channel.stream.message());
    const auto header = body.value<wire::Header>();
    if (!header || header->magic != wire::kMagic || boot_ == 0) return false;
    ++n_requests_;
    note_use(channel);
    if (static_cast<wire::Kind>(header->kind) == wire::Kind::kPromote) {
      channel.is_promoting = true;
      answer_promotion(promoter().get(), *header, body, boot_, {kLongestLease, channel.id},
                       [this, id = channel.id](std::string reply) { add_reply(id, std::move(reply)); });
    } else if (static_cast<wire::Kind>(header->kind) == wire::Kind::kRelease) {
      return take_release(promoter().get(), *header, body, boot_);
    } else if (static_cast<wire::Kind>(header->kind) == wire::Kind::kTouch) {
      channel.stream.put(answer_touched(*header, body), {});
    } else {
      channel.stream.put(answer_directory_request(*shard_, *header, body, boot_), {});
    }
    return true;
  }

  std::string answer_touched(const wire::Header& header, const wire::Reader& body) {
    const std::shared_ptr<const Touch> touch = [this] {
      const std::lock_guard lock(mutex_);
      return touch_;
    }();
    uint64_t n_touched = 0;
    std::string reply = answer_touches(*touch, &touch_budget_, header, body, boot_, &n_touched);
    n_touched_ += n_touched;
    return reply;
  }

  void note_use(Channel& channel) {
    const std::lock_guard lock(mutex_);
    channel.used = Deadline::Clock::now();
  }

  std::shared_ptr<Promoter> promoter() {
    const std::lock_guard lock(mutex_);
    return promoter_;
  }

  // From any thread.
  void add_reply(uint64_t id, std::string message) {
    const std::lock_guard lock(mutex_);
    if (is_closing_) return;
    replies_.emplace_back(id, std::move(message));
    replied_.set();
  }

  void send_replies() {
    std::vector<std::pair<uint64_t, std::string>> replies;
    {
      const std::lock_guard lock(mutex_);
      replied_.clear();
      replies.swap(replies_);
    }
    for (const auto& [id, message] : replies) {
      Channel* channel = find(id);
      if (channel == nullptr) continue;
      channel->is_promoting = false;
      channel->stream.put(message, {});
      if (!serve(*channel, 0)) hang_up(id);
    }
  }

  const std::shared_ptr<Shard> shard_;
  const pid_t pid_ = getpid();
  std::atomic<uint64_t> boot_{0};
  std::atomic<uint64_t> n_requests_{0};
  std::atomic<uint64_t> n_touched_{0};
  TouchBudget touch_budget_;  // of the server's thread
  const UniqueFd epoll_{epoll_create1(EPOLL_CLOEXEC)};
  Wakeup stop_;
  Wakeup replied_;
  SealedDoor door_{kDirectoryDoor, [this](SealedStream stream) { admit(std::move(stream)); }};
  NamedThread thread_;
  std::mutex closing_;  // held by the one close() that does the work
  std::mutex mutex_;    // guards all below
  std::unordered_map<uint64_t, std::unique_ptr<Channel>> channels_;
  uint64_t next_id_ = kReplies + 1;
  std::shared_ptr<Promoter> promoter_;
  std::shared_ptr<const Touch> touch_ = std::make_shared<const Touch>();
  std::vector<std::pair<uint64_t, std::string>> replies_;  // to promotions: channel and message
  bool is_closing_ = false;
};

}  // namespace

std::shared_ptr<DirectoryServer> DirectoryServer::start(const ListenAt& at, std::shared_ptr<Shard> shard,
                                                        std::string* error) {
  auto server = std::make_shared<EpollDirectoryServer>(std::move(shard));
  return server->start(at, error) ? server : nullptr;
}

}  // namespace p2pkv
