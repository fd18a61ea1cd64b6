#include "bench/bench.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <vector>

namespace p2pkv::bench {
namespace {

constexpr size_t kMaxVectors = 1024;  // IOV_MAX of Linux

// On the stream: the number of spans, then offset and length of each.
struct Wanted {
  int64_t offset;
  int64_t length;
};

// Drops the first `done` bytes from the vectors that begin at `first`; returns the new beginning.
size_t advance(std::vector<iovec>& vectors, size_t first, size_t done) {
  while (first < vectors.size() && done >= vectors[first].iov_len) done -= vectors[first++].iov_len;
  if (done > 0) {
    vectors[first].iov_base = static_cast<char*>(vectors[first].iov_base) + done;
    vectors[first].iov_len -= done;
  }
  return first;
}

// Moves every byte of the vectors through `call`, which is sendmsg or recvmsg. 0 or an errno.
template <typename Call>
int move_all(std::vector<iovec>& vectors, Call call) {
  size_t first = advance(vectors, 0, 0);
  while (first < vectors.size()) {
    msghdr message{};
    message.msg_iov = &vectors[first];
    message.msg_iovlen = std::min(vectors.size() - first, kMaxVectors);
    const ssize_t done = call(&message);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return done < 0 ? errno : ECONNRESET;
    first = advance(vectors, first, static_cast<size_t>(done));
  }
  return 0;
}

int send_all(int fd, std::vector<iovec>& vectors) {
  return move_all(vectors, [fd](msghdr* message) { return sendmsg(fd, message, MSG_NOSIGNAL); });
}

int receive_all(int fd, std::vector<iovec>& vectors) {
  return move_all(vectors, [fd](msghdr* message) { return recvmsg(fd, message, MSG_WAITALL); });
}

int receive_all(int fd, void* to, size_t nbytes) {
  std::vector<iovec> vectors{{to, nbytes}};
  return receive_all(fd, vectors);
}

int receive_batch(int fd, uint8_t* base, const Span* spans, size_t n) {
  std::vector<Wanted> wanted(n);
  std::vector<iovec> into(n);
  for (size_t i = 0; i < n; ++i) {
    wanted[i] = {spans[i].remote, spans[i].length};
    into[i] = {base + spans[i].local, static_cast<size_t>(spans[i].length)};
  }
  uint64_t count = n;
  std::vector<iovec> request{{&count, sizeof count}, {wanted.data(), n * sizeof(Wanted)}};
  const int error = send_all(fd, request);
  return error != 0 ? error : receive_all(fd, into);
}

}  // namespace

int receive_spans(int fd, uint8_t* base, const Span* spans, size_t n, size_t batch) {
  for (size_t i = 0; i < n; i += batch) {
    const int error = receive_batch(fd, base, spans + i, std::min(batch, n - i));
    if (error != 0) return error;
  }
  return 0;
}

int serve_spans(int fd, const uint8_t* base, size_t nbytes) {
  for (;;) {
    uint64_t count;
    int error = receive_all(fd, &count, sizeof count);
    if (error == ECONNRESET) return 0;
    if (error != 0) return error;
    if (count > 1 << 24) return EMSGSIZE;
    std::vector<Wanted> wanted(count);
    error = receive_all(fd, wanted.data(), count * sizeof(Wanted));
    if (error != 0) return error;
    std::vector<iovec> from;
    from.reserve(count);
    for (const Wanted& span : wanted) {
      const auto offset = static_cast<uint64_t>(span.offset), length = static_cast<uint64_t>(span.length);
      if (offset > nbytes || length > nbytes - offset) return ERANGE;
      from.push_back({const_cast<uint8_t*>(base) + offset, length});
    }
    error = send_all(fd, from);
    if (error != 0) return error;
  }
}

}  // namespace p2pkv::bench
