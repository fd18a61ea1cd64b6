#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "net/record_inbox.h"
#include "transports/tcp/wire.h"

namespace p2pkv::tcp {
namespace {

// `nbytes` of the pieces, which have room for them, from the first on.
void scatter(const uint8_t* from, size_t nbytes, const iovec* pieces) {
  for (; nbytes > 0; ++pieces) {
    const size_t n = std::min(nbytes, pieces->iov_len);
    std::memcpy(pieces->iov_base, from, n);
    from += n;
    nbytes -= n;
  }
}

// No record has bytes of pages and what proves them.
class SealedWire final : public Wire {
 public:
  SealedWire(const CipherKey& session, const Hello& hello, Sender self, uint64_t rekey_after,
             std::atomic<uint64_t>* n_forged)
      : sealer_(connection_key(session, hello, self), rekey_after),
        opener_(connection_key(session, hello, self == Sender::kReader ? Sender::kOwner : Sender::kReader),
                rekey_after),
        n_forged_(n_forged) {}

  Progress receive(int connection, const iovec* pieces, size_t n_pieces, size_t* n_bytes) override {
    *n_bytes = 0;
    size_t room = 0;
    for (size_t i = 0; i < n_pieces; ++i) room += pieces[i].iov_len;
    switch (inbox_.receive(connection, room)) {
      case RecordInbox::Progress::kMoved:
        return Progress::kMoved;
      case RecordInbox::Progress::kBlocked:
        return Progress::kBlocked;
      case RecordInbox::Progress::kLost:
        return Progress::kLost;
      case RecordInbox::Progress::kRecord:
        break;
    }
    const size_t nbytes = RecordOpener::n_bytes(inbox_.record());
    if (nbytes > room || !opener_.open(inbox_.record())) {
      n_forged_->fetch_add(1, std::memory_order_relaxed);
      return Progress::kLost;
    }
    // Only now, so that nothing lands anywhere that the other end has not sent.
    scatter(inbox_.record() + RecordCipher::kLengthBytes, nbytes, pieces);
    *n_bytes = nbytes;
    inbox_.drop();
    holds_more_.store(!inbox_.is_empty(), std::memory_order_relaxed);
    return Progress::kMoved;
  }

  Progress send(int connection, const iovec* pieces, size_t n_pieces, bool is_last,
                size_t* n_bytes) override {
    *n_bytes = 0;
    if (kRoom - n_sealed_ < kMostRecord) {
      const Progress progress = flush(connection);
      if (progress != Progress::kMoved) return progress;
    }
    if (!outbox_) outbox_.reset(new uint8_t[kRoom]);
    // As many of the pieces as a record may have, and of the last one what is left.
    std::array<iovec, kMostPieces> taken;
    size_t n = 0, room = RecordCipher::kMostBytes;
    for (; n < std::min(n_pieces, kMostPieces) && room > 0; room -= taken[n++].iov_len) {
      taken[n] = {pieces[n].iov_base, std::min(pieces[n].iov_len, room)};
    }
    const size_t nbytes = RecordCipher::kMostBytes - room;
    if (!sealer_.seal(taken.data(), n, outbox_.get() + n_sealed_)) return Progress::kLost;
    n_sealed_ += nbytes + RecordCipher::kOverhead;
    *n_bytes = nbytes;
    if (!is_last && n_sealed_ < kEnough) return Progress::kMoved;
    return flush(connection) == Progress::kLost ? Progress::kLost : Progress::kMoved;
  }

  Progress flush(int connection) override {
    while (n_sent_ < n_sealed_) {
      const ssize_t n =
          ::send(connection, outbox_.get() + n_sent_, n_sealed_ - n_sent_, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? Progress::kBlocked : Progress::kLost;
      n_sent_ += static_cast<size_t>(n);
    }
    n_sent_ = n_sealed_ = 0;
    return Progress::kMoved;
  }

  bool append(const void* bytes, size_t nbytes, std::vector<uint8_t>* to) override {
    return sealer_.seal_all(bytes, nbytes, to);
  }

  bool holds_more() const override { return holds_more_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kMostPieces = 256;  // of a record, as of what receives it
  static constexpr size_t kMostRecord = RecordCipher::kMostBytes + RecordCipher::kOverhead;
  static constexpr size_t kRoom = 2 * kMostRecord;
  static constexpr size_t kEnough = RecordCipher::kMostBytes;  // to be sent before more is sealed

  RecordSealer sealer_;
  RecordOpener opener_;
  RecordInbox inbox_;
  std::atomic<bool> holds_more_{false};
  std::unique_ptr<uint8_t[]> outbox_;  // from the first send() on
  size_t n_sealed_ = 0, n_sent_ = 0;   // bytes of it
  std::atomic<uint64_t>* const n_forged_;
};

}  // namespace

std::unique_ptr<Wire> Sealing::wire(const CipherKey& session, const Hello& hello, Sender self) {
  return std::make_unique<SealedWire>(session, hello, self, rekey_after_, &n_forged_);
}

}  // namespace p2pkv::tcp
