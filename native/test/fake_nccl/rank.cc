#include "rank.h"

#include <dlfcn.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>

namespace fake {
namespace {

constexpr uint64_t kPiece = 65536;

void pause(int us) {
  if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

socklen_t address_of(const std::string& name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());  // in the abstract namespace
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

}  // namespace

const Driver& Driver::get() {
  static const Driver driver = [] {
    Driver found{};
    void* library = dlopen(P2PKV_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) {
      found.launch = reinterpret_cast<decltype(found.launch)>(dlsym(library, "cuLaunchHostFunc"));
      found.attributes =
          reinterpret_cast<decltype(found.attributes)>(dlsym(library, "cuPointerGetAttributes"));
    }
    if (found.launch == nullptr || found.attributes == nullptr) {
      std::cerr << "the emulated NCCL needs " << P2PKV_FAKE_CUDA << "\n";
      std::abort();
    }
    return found;
  }();
  return driver;
}

bool Driver::is_page_locked(uint64_t address) const {
  int attribute = 2;
  unsigned type = 0;
  void* data[] = {&type};
  return attributes(1, &attribute, data, address) == 0 && type == 1;
}

void Rank::begin() {
  ending_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  ++wishes.communicators;
  thread_ = std::thread([this] { run(); });
}

void Rank::queue(std::deque<Operation> operations) {
  const std::lock_guard lock(mutex_);
  if (state_ == kSuccess) state_ = kInProgress;
  for (const Operation& operation : operations) queued_.push_back(operation);
  changed_.notify_all();
}

int Rank::state() {
  const std::lock_guard lock(mutex_);
  return state_;
}

void Rank::abort() {
  ++wishes.aborts;
  is_aborted_ = true;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(ending_, &one, sizeof one);
  {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
  {
    const std::lock_guard lock(wishes.mutex);
    wishes.let_go.notify_all();
  }
  thread_.join();
  pause(wishes.abort_delay_us);
  while (n_moving_ > 0) std::this_thread::yield();
  if (connection_ >= 0) close(connection_);
  close(ending_);
  --wishes.communicators;
}

void Rank::run() {
  if (!meet()) return;
  std::unique_lock lock(mutex_);
  state_ = kSuccess;
  while (!is_aborted_) {
    changed_.wait(lock, [this] { return is_aborted_ || !queued_.empty(); });
    if (is_aborted_) return;
    std::deque<Operation> operations = std::move(queued_);
    queued_.clear();
    lock.unlock();
    const bool is_good = set_up();
    if (is_good) {
      for (const Operation& operation : operations) put(operation);
    }
    lock.lock();
    if (is_good && queued_.empty() && state_ == kInProgress) state_ = kSuccess;
  }
}

// Rank 0 listens and rank 1 connects, however long that takes.
bool Rank::meet() {
  {
    const std::lock_guard lock(wishes.mutex);
    if (wishes.meeting_to_fail > 0 && --wishes.meeting_to_fail == 0) {
      fail(wishes.meeting_result);
      return false;
    }
  }
  sockaddr_un address;
  const socklen_t length = address_of(name_, &address);
  const auto* where = reinterpret_cast<const sockaddr*>(&address);
  while (!is_aborted_ && wishes.never_meet) pause(500);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (rank_ == 0) {
    if (bind(fd, where, length) == 0 && listen(fd, 1) == 0 && wait_for(fd, POLLIN))
      connection_ = accept4(fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    close(fd);
  } else {
    while (!is_aborted_ && connect(fd, where, length) != 0) pause(500);
    connection_ = fd;
  }
  if (is_aborted_) return false;
  if (connection_ < 0) fail(kSystemError);
  if (connection_ >= 0) ++wishes.met;
  return connection_ >= 0;
}

// As with NCCL, the first operation connects the two ranks for good, for which both must have begun one.
bool Rank::set_up() {
  if (is_set_up_) return true;
  uint8_t byte = 1;
  if (!send_all(&byte, 1, -1) || !receive_all(&byte, 1, -1)) {
    fail(kRemoteError);
    return false;
  }
  is_set_up_ = true;
  return true;
}

void Rank::put(const Operation& operation) {
  struct Moving {
    std::shared_ptr<Rank> rank;
    Operation operation;
  };
  ++n_moving_;
  const auto run = [](void* data) {
    const std::unique_ptr<Moving> moving(static_cast<Moving*>(data));
    moving->rank->move(moving->operation);
    --moving->rank->n_moving_;
  };
  auto* moving = new Moving{shared_from_this(), operation};
  if (Driver::get().launch(operation.stream, run, moving) == 0) return;
  delete moving;
  --n_moving_;
  fail(kCudaError);
}

// Runs on the stream's thread.
void Rank::move(const Operation& operation) {
  const Driver& driver = Driver::get();
  if (!driver.is_page_locked(operation.address) ||
      !driver.is_page_locked(operation.address + operation.nbytes - 1)) {
    return fail(kCudaError);  // it would be a fault of the device
  }
  const int failure = take_failure();
  const int64_t fails_after = failure == 0 ? -1 : static_cast<int64_t>(operation.nbytes / 2);
  auto* memory = reinterpret_cast<uint8_t*>(operation.address);
  uint64_t announced = operation.nbytes;
  auto* header = reinterpret_cast<uint8_t*>(&announced);
  bool is_good;
  if (operation.is_send) {
    ++wishes.sends;
    is_good = send_all(header, sizeof announced, -1) && send_all(memory, operation.nbytes, fails_after);
  } else {
    is_good = receive_all(header, sizeof announced, -1) && announced == operation.nbytes &&
              receive_all(memory, operation.nbytes, fails_after);
  }
  if (!is_good) fail(failure != 0 ? failure : kRemoteError);
}

bool Rank::send_all(const uint8_t* from, uint64_t nbytes, int64_t fails_after) {
  for (uint64_t done = 0; done < nbytes;) {
    if (is_aborted_ || (fails_after >= 0 && done >= static_cast<uint64_t>(fails_after))) return false;
    if (nbytes > 8) {
      std::unique_lock lock(wishes.mutex);
      wishes.let_go.wait(lock, [this] { return !wishes.is_held || is_aborted_; });
    }
    const uint64_t n_piece = std::min(nbytes - done, kPiece);
    if (done % kPiece == 0 && nbytes > 8) pause(wishes.delay_us);
    // Past the sanitizers: the owner may rewrite what is being sent, and its reader finds out.
    const ssize_t n =
        syscall(SYS_sendto, connection_, from + done, n_piece, MSG_NOSIGNAL | MSG_DONTWAIT, nullptr, 0);
    if (n < 0 && errno != EAGAIN && errno != EINTR) return false;
    if (n < 0 && !wait_for(connection_, POLLOUT)) return false;
    if (n > 0) done += static_cast<uint64_t>(n);
    if (n > 0 && nbytes > 8) wishes.sent_bytes += n;
  }
  return true;
}

bool Rank::receive_all(uint8_t* to, uint64_t nbytes, int64_t fails_after) {
  for (uint64_t done = 0; done < nbytes;) {
    if (is_aborted_ || (fails_after >= 0 && done >= static_cast<uint64_t>(fails_after))) return false;
    const ssize_t n = recv(connection_, to + done, std::min(nbytes - done, kPiece), MSG_DONTWAIT);
    if (n == 0) return wait_for(-1, 0);  // as with NCCL, that the other side has died shows nowhere
    if (n < 0 && errno != EAGAIN && errno != EINTR) return wait_for(-1, 0);
    if (n < 0 && !wait_for(connection_, POLLIN)) return false;
    if (n > 0) done += static_cast<uint64_t>(n);
  }
  return true;
}

// False once aborted.
bool Rank::wait_for(int fd, short events) {
  pollfd waiting[] = {{ending_, POLLIN, 0}, {fd, events, 0}};
  while (!is_aborted_) {
    if (poll(waiting, fd < 0 ? 1 : 2, -1) > 0 && waiting[0].revents == 0) return true;
  }
  return false;
}

void Rank::fail(int result) {
  const std::lock_guard lock(mutex_);
  if (!is_aborted_) state_ = result;
}

int Rank::take_failure() {
  const std::lock_guard lock(wishes.mutex);
  if (wishes.operation_to_fail == 0 || --wishes.operation_to_fail > 0) return 0;
  return wishes.operation_result;
}

}  // namespace fake
