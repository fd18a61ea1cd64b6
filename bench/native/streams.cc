// Raw streams, which the benchmark compares p2pkv with: as fast as C gets, and without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// One piece of memory to receive, as in p2pkv's own Spans: a row of the (n, 3) int64 array, in bytes.
struct Span {
  int64_t local;   // offset from the receiver's base
  int64_t remote;  // offset from the sender's base
  int64_t length;
};
using Spans = nb::ndarray<const int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

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

// Asks the other end of a connected stream for the spans, and receives them with scatter-gather straight to
// their places. 0 or an errno.
int receive_spans(int fd, uintptr_t base, const Spans& spans) {
  const auto* rows = reinterpret_cast<const Span*>(spans.data());
  uint64_t count = spans.shape(0);
  const nb::gil_scoped_release unlocked;
  std::vector<Wanted> wanted(count);
  std::vector<iovec> into(count);
  for (size_t i = 0; i < count; ++i) {
    wanted[i] = {rows[i].remote, rows[i].length};
    into[i] = {reinterpret_cast<uint8_t*>(base) + rows[i].local, static_cast<size_t>(rows[i].length)};
  }
  std::vector<iovec> request{{&count, sizeof count}, {wanted.data(), count * sizeof(Wanted)}};
  const int error = send_all(fd, request);
  return error != 0 ? error : receive_all(fd, into);
}

// Answers receive_spans out of the `nbytes` from `base` on, until the peer hangs up. 0 or an errno.
int serve_spans(int fd, uintptr_t base, size_t nbytes) {
  const nb::gil_scoped_release unlocked;
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
      from.push_back({reinterpret_cast<uint8_t*>(base) + offset, length});
    }
    error = send_all(fd, from);
    if (error != 0) return error;
  }
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The raw streams that the benchmark compares p2pkv with.";
  m.def("receive_spans", receive_spans, "fd"_a, "base"_a, "spans"_a.noconvert());
  m.def("serve_spans", serve_spans, "fd"_a, "base"_a, "nbytes"_a);
}
