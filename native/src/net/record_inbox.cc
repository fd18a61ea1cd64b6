#include "net/record_inbox.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace p2pkv {

RecordInbox::Progress RecordInbox::receive(int connection, size_t most) {
  if (has_record(most)) return Progress::kRecord;
  if (!bytes_) bytes_.reset(new uint8_t[kRoom]);
  std::memmove(bytes_.get(), bytes_.get() + begin_, n_here());
  end_ -= begin_;
  begin_ = 0;
  const ssize_t n = recv(connection, bytes_.get() + end_, kRoom - end_, MSG_DONTWAIT);
  if (n < 0 && errno == EINTR) return Progress::kMoved;
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Progress::kBlocked;
  if (n <= 0) return Progress::kLost;
  end_ += static_cast<size_t>(n);
  return has_record(most) ? Progress::kRecord : Progress::kMoved;
}

void RecordInbox::drop() {
  begin_ += RecordOpener::n_bytes(record()) + RecordCipher::kOverhead;
}

bool RecordInbox::has_record(size_t most) const {
  if (n_here() < RecordCipher::kLengthBytes) return false;
  const size_t nbytes = RecordOpener::n_bytes(record());
  return nbytes == 0 || nbytes > most || n_here() >= nbytes + RecordCipher::kOverhead;
}

}  // namespace p2pkv
