#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "transports/tcp/wire.h"

namespace p2pkv::tcp {
namespace {

// sendmsg of memory that its owner may be rewriting: what the reader gets counts only after the word has been
// checked.
ssize_t racy_sendmsg(int connection, const msghdr* message, int flags) {
#if defined(__SANITIZE_THREAD__)
  // past the sanitizer's own sendmsg, which would report it
  return syscall(SYS_sendmsg, connection, message, flags);
#else
  return sendmsg(connection, message, flags);
#endif
}

class PlainWire final : public Wire {
 public:
  // Bytes go straight from the kernel to where they belong.
  Progress receive(int connection, const iovec* pieces, size_t n_pieces, size_t* n_bytes) override {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces);
    message.msg_iovlen = n_pieces;
    const ssize_t n = recvmsg(connection, &message, MSG_DONTWAIT);
    return n == 0 ? Progress::kLost : progress(n, n_bytes);
  }

  // The kernel copies the bytes (no zero-copy): what it has taken no longer changes.
  Progress send(int connection, const iovec* pieces, size_t n_pieces, bool is_last,
                size_t* n_bytes) override {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces);
    message.msg_iovlen = n_pieces;
    const int flags = MSG_DONTWAIT | MSG_NOSIGNAL | (is_last ? 0 : MSG_MORE);
    return progress(racy_sendmsg(connection, &message, flags), n_bytes);
  }

  Progress flush(int) override { return Progress::kMoved; }

  bool append(const void* bytes, size_t nbytes, std::vector<uint8_t>* to) override {
    const auto* at = static_cast<const uint8_t*>(bytes);
    to->insert(to->end(), at, at + nbytes);
    return true;
  }

  bool holds_more() const override { return false; }

 private:
  static Progress progress(ssize_t n, size_t* n_bytes) {
    *n_bytes = n < 0 ? 0 : static_cast<size_t>(n);
    if (n >= 0 || errno == EINTR) return Progress::kMoved;
    return errno == EAGAIN || errno == EWOULDBLOCK ? Progress::kBlocked : Progress::kLost;
  }
};

}  // namespace

std::unique_ptr<Wire> plain_wire() {
  return std::make_unique<PlainWire>();
}

}  // namespace p2pkv::tcp
