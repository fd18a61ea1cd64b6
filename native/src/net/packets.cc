#include "net/packets.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace p2pkv {
namespace {

// Alignment leaves room for a second descriptor here; the kernel cuts off, and closes, what is beyond that.
constexpr size_t kControlBytes = CMSG_SPACE(sizeof(int));

UniqueFd take_descriptor(msghdr* message) {
  UniqueFd taken;
  for (cmsghdr* header = CMSG_FIRSTHDR(message); header != nullptr; header = CMSG_NXTHDR(message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    // Each of them is this process's by now, so that one nobody expects is closed here or never.
    const size_t n = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < n; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
      UniqueFd one(fd);
      if (n == 1) taken = std::move(one);
    }
  }
  return taken;
}

bool wait_for(int connection, int16_t events, const Deadline& deadline) {
  for (;;) {
    pollfd one{connection, events, 0};
    const int n = poll(&one, 1, deadline.poll_ms());
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return true;  // what is tried next says what is wrong
    if (deadline.passed()) return false;
  }
}

}  // namespace

bool is_own_user(int connection) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

bool send_bytes(int connection, const void* data, size_t nbytes, int fd) {
  iovec part{const_cast<void*>(data), nbytes};
  alignas(cmsghdr) char control[kControlBytes] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
  }
  return sendmsg(connection, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(nbytes);
}

Received receive_bytes(int connection, void* data, size_t nbytes, UniqueFd* fd) {
  iovec part{data, nbytes};
  alignas(cmsghdr) char control[kControlBytes] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t n = recvmsg(connection, &message, MSG_DONTWAIT | MSG_TRUNC | MSG_CMSG_CLOEXEC);
  if (n < 0) return errno == EAGAIN || errno == EINTR ? Received::kNothing : Received::kEnd;
  UniqueFd brought = take_descriptor(&message);
  if (n == 0) return Received::kEnd;
  if (fd != nullptr) *fd = std::move(brought);
  return static_cast<size_t>(n) == nbytes ? Received::kPacket : Received::kWrong;
}

bool wait_readable(int connection, const Deadline& deadline) {
  return wait_for(connection, POLLIN, deadline);
}

bool wait_writable(int connection, const Deadline& deadline) {
  return wait_for(connection, POLLOUT, deadline);
}

bool has_hung_up(int connection) {
  pollfd one{connection, POLLRDHUP, 0};
  return poll(&one, 1, 0) > 0 && (one.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

}  // namespace p2pkv
