#include "control/zmq_socket.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>

namespace p2pkv {
namespace {

// Messages taken between two looks at the stop flag and the tick.
constexpr int kBurst = 64;
// More frames than any of our messages has; the rest of a longer one is read and dropped.
constexpr size_t kMaxFrames = 16;

}  // namespace

ZmqServerThread::ZmqServerThread(void* socket, const char* name, int tick_ms, Callbacks callbacks)
    : socket_(socket),
      name_(name),
      tick_ms_(tick_ms),
      callbacks_(std::move(callbacks)),
      wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      owner_pid_(getpid()) {}

ZmqServerThread::~ZmqServerThread() {
  stop();
  close(wake_fd_);
}

void ZmqServerThread::start() {
  if (!thread_.start(name_, [this] { run(); }))
    throw std::runtime_error("cannot start a thread for the control plane");
}

void ZmqServerThread::stop() {
  if (getpid() == owner_pid_) {
    stopping_ = true;
    wake();
  }
  thread_.join();
}

void ZmqServerThread::wake() {
  const uint64_t one = 1;
  // The only possible failure is a full counter, and then the thread is woken anyway.
  [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof one);
}

void ZmqServerThread::run() {
  const ZmqApi& zmq = ZmqApi::get();
  ZmqApi::PollItem items[2] = {{socket_, 0, ZmqApi::kPollIn, 0}, {nullptr, wake_fd_, ZmqApi::kPollIn, 0}};
  auto next_tick = std::chrono::steady_clock::now();
  while (!stopping_) {
    if (zmq.poll(items, 2, tick_ms_) < 0 && zmq.zmq_errno() != EINTR) return;  // ETERM: the context is gone
    if (items[1].revents != 0) {
      uint64_t count;
      [[maybe_unused]] const ssize_t got = read(wake_fd_, &count, sizeof count);
      if (callbacks_.woken) callbacks_.woken();
    }
    Frames frames;
    for (int i = 0; i < kBurst && receive(&frames); ++i) callbacks_.received(std::move(frames));
    const auto now = std::chrono::steady_clock::now();
    if (callbacks_.ticked && now >= next_tick) {
      next_tick = now + std::chrono::milliseconds(tick_ms_);
      callbacks_.ticked();
    }
  }
}

bool ZmqServerThread::receive(Frames* frames) {
  const ZmqApi& zmq = ZmqApi::get();
  frames->clear();
  for (bool more = true; more;) {
    ZmqApi::Message message;
    zmq.msg_init(&message);
    // Parts of one message arrive together: only the first receive can find nothing.
    if (zmq.msg_recv(&message, socket_, ZmqApi::kDontWait) < 0) {
      zmq.msg_close(&message);
      return false;
    }
    if (frames->size() < kMaxFrames) {
      frames->emplace_back(static_cast<const char*>(zmq.msg_data(&message)), zmq.msg_size(&message));
    }
    more = zmq.msg_more(&message) != 0;
    zmq.msg_close(&message);
  }
  return true;
}

void ZmqServerThread::send(const Frames& frames) {
  const ZmqApi& zmq = ZmqApi::get();
  for (size_t i = 0; i < frames.size(); ++i) {
    ZmqApi::Message message;
    zmq.msg_init_size(&message, frames[i].size());
    std::memcpy(zmq.msg_data(&message), frames[i].data(), frames[i].size());
    const int flags = ZmqApi::kDontWait | (i + 1 < frames.size() ? ZmqApi::kSendMore : 0);
    if (zmq.msg_send(&message, socket_, flags) < 0) {
      zmq.msg_close(&message);
      return;  // the receiver is gone or does not read: its request runs into its deadline
    }
  }
}

int ZmqServerThread::bind(const char* address) {
  const ZmqApi& zmq = ZmqApi::get();
  return zmq.bind(socket_, address) == 0 ? 0 : zmq.zmq_errno();
}

int ZmqServerThread::unbind(const char* address) {
  const ZmqApi& zmq = ZmqApi::get();
  return zmq.unbind(socket_, address) == 0 ? 0 : zmq.zmq_errno();
}

}  // namespace p2pkv
