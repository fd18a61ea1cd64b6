#include "net/sealed_stream.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "base/zmq_api.h"

namespace p2pkv {
namespace {

// Takes a look-up of 128 keys and its answer in one system call.
constexpr size_t kBufferBytes = 16 << 10;
// A buffer that one large batch has grown is not kept for ever.
constexpr size_t kMaxIdleBytes = 256 << 10;

}  // namespace

bool SealedStream::is_available() {
  return ZmqApi::get().aead_seal != nullptr && ZmqApi::get().aead_open != nullptr;
}

SealedStream::SealedStream(UniqueFd connection, const SessionKey& key, Side side)
    : connection_(std::move(connection)), key_(key), side_(side), incoming_(kBufferBytes) {}

std::array<uint8_t, 12> SealedStream::nonce(Side from, uint64_t number) const {
  std::array<uint8_t, 12> nonce;
  std::memcpy(nonce.data(), &from, 4);
  std::memcpy(nonce.data() + 4, &number, 8);
  return nonce;
}

void SealedStream::put(std::string_view head, std::string_view body) {
  const uint32_t n_message = static_cast<uint32_t>(head.size() + body.size());
  const uint32_t n_sealed = n_message + kTagBytes;
  const size_t at = outgoing_.size();
  outgoing_.resize(at + kLengthBytes + n_sealed);
  char* sealed = outgoing_.data() + at + kLengthBytes;
  std::memcpy(outgoing_.data() + at, &n_sealed, kLengthBytes);
  std::memcpy(sealed, head.data(), head.size());
  if (!body.empty()) std::memcpy(sealed + head.size(), body.data(), body.size());
  auto* bytes = reinterpret_cast<unsigned char*>(sealed);
  const auto number = nonce(side_, n_put_++);
  ZmqApi::get().aead_seal(bytes, nullptr, bytes, n_message, nullptr, 0, nullptr, number.data(), key_.data());
}

bool SealedStream::flush() {
  while (has_outgoing()) {
    const ssize_t n =
        send(fd(), outgoing_.data() + n_sent_, outgoing_.size() - n_sent_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    // ENOTCONN: still connecting.
    if (n < 0) return errno == EAGAIN || errno == ENOTCONN || errno == EINPROGRESS;
    n_sent_ += static_cast<size_t>(n);
  }
  outgoing_.clear();
  n_sent_ = 0;
  shrink();
  return true;
}

SealedStream::Progress SealedStream::receive() {
  for (;;) {
    const Progress opened = open_frame();
    if (opened != Progress::kBlocked) return opened;
    const ssize_t n =
        recv(fd(), incoming_.data() + n_incoming_, incoming_.size() - n_incoming_, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == ENOTCONN)) return Progress::kBlocked;
    if (n <= 0) return Progress::kLost;
    n_incoming_ += static_cast<size_t>(n);
  }
}

SealedStream::Progress SealedStream::open_frame() {
  // What was opened before is done with: the rest moves to the front, and the next recv has the whole buffer.
  if (n_consumed_ > 0) {
    std::memmove(incoming_.data(), incoming_.data() + n_consumed_, n_incoming_ - n_consumed_);
    n_incoming_ -= n_consumed_;
    n_consumed_ = 0;
  }
  message_ = {};
  if (n_incoming_ == 0) shrink();
  if (n_incoming_ < kLengthBytes) return Progress::kBlocked;
  uint32_t n_sealed;
  std::memcpy(&n_sealed, incoming_.data(), kLengthBytes);
  if (n_sealed < kTagBytes || n_sealed > kMaxMessage + kTagBytes) return Progress::kLost;
  const size_t n_frame = kLengthBytes + n_sealed;
  if (n_incoming_ < n_frame) {
    if (incoming_.size() < n_frame) incoming_.resize(n_frame);
    return Progress::kBlocked;
  }
  uint8_t* sealed = incoming_.data() + kLengthBytes;
  const auto number = nonce(side_ == Side::kOwner ? Side::kReader : Side::kOwner, n_received_++);
  if (ZmqApi::get().aead_open(sealed, nullptr, nullptr, sealed, n_sealed, nullptr, 0, number.data(),
                              key_.data()) != 0) {
    return Progress::kLost;
  }
  n_consumed_ = n_frame;
  message_ = {reinterpret_cast<const char*>(sealed), n_sealed - kTagBytes};
  return Progress::kFrame;
}

void SealedStream::shut_down() {
  shutdown(fd(), SHUT_RDWR);
}

void SealedStream::shrink() {
  if (outgoing_.empty() && outgoing_.capacity() > kMaxIdleBytes) outgoing_.shrink_to_fit();
  if (n_incoming_ == 0 && incoming_.size() > kMaxIdleBytes)
    std::vector<uint8_t>(kBufferBytes).swap(incoming_);
}

}  // namespace p2pkv
