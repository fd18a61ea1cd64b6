// File descriptors that close themselves, and the eventfd that ends a poll(2).
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

namespace p2pkv {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  ~UniqueFd() { reset(); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

// Wakes threads out of poll(2): poll `fd()` for POLLIN.
class Wakeup {
 public:
  Wakeup() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  int fd() const { return fd_.get(); }
  void set() const {
    if (getpid() != pid_)
      return;  // a forked child shares the eventfd, and must not stop its parent's threads
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(fd_.get(), &one, sizeof one);  // can only fail when set already
  }
  // Frees the descriptor; nobody may poll it any more. set() does nothing from then on.
  void close() { fd_.reset(); }
  void clear() const {
    uint64_t count;
    [[maybe_unused]] const ssize_t n = read(fd_.get(), &count, sizeof count);
  }

 private:
  UniqueFd fd_;
  const pid_t pid_ = getpid();
};

}  // namespace p2pkv
