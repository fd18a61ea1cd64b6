#include "page/writer_lock.h"

#include <sys/file.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "page/region.h"

namespace p2pkv {
namespace {

// The kernel has no wait with an end for it.
constexpr std::chrono::milliseconds kLook{2};

}  // namespace

WriterLock WriterLock::take(int memfd, const Deadline& deadline, std::string* error) {
  WriterLock lock;
  UniqueFd own = open_read_only(memfd);
  if (!own) {
    *error = std::string("cannot open it: ") + std::strerror(errno);
    return lock;
  }
  while (flock(own.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      *error = std::string("cannot lock it: ") + std::strerror(errno);
      return lock;
    }
    if (deadline.passed()) {
      *error = "a process that writes to it has not ended";
      return lock;
    }
    std::this_thread::sleep_for(kLook);
  }
  lock.held_ = std::move(own);
  return lock;
}

}  // namespace p2pkv
