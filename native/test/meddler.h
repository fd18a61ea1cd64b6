// Somebody on the wire between a tcp reader and its owner, who encrypt: he passes on what goes by, record by
// record, and does one thing to it that he should not be able to do unseen.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "loopback_port.h"
#include "net/frames.h"
#include "net/record_cipher.h"

namespace p2pkv::test {

enum class Meddling {
  kNothing,
  kFlipLength,
  kFlipBytes,
  kFlipTag,
  kLeaveOut,
  kRepeat,
  kSwap,     // with the next
  kEarlier,  // instead of it, the one before of the same direction
  kReflect,  // instead of it, the one of that number which its receiver has sent itself
  kCut,      // in its middle
};

class Meddler {
 public:
  // What is done to the record of this number and direction; 0: of the reader, 1: of the owner.
  struct Plan {
    Meddling what = Meddling::kNothing;
    size_t direction = 0, number = 0;
    uint64_t dice = 0;  // which bit
  };

  // Passes one connection on, to 127.0.0.1:`target`. `secret`: what must not be read on the wire.
  Meddler(uint16_t target, Plan plan, std::string secret)
      : plan_(plan), secret_(std::move(secret)), target_(target), listener_(listen_at_loopback(&port_, 4)) {
    thread_ = std::thread([this] { run(); });
  }
  ~Meddler() {
    is_closing_ = true;
    wake_.set();
    thread_.join();
  }

  uint16_t port() const { return port_; }
  bool has_meddled() const { return has_meddled_; }
  bool has_read_secret() const { return has_read_secret_; }

 private:
  struct Direction {
    std::string waiting;             // not passed on yet
    std::string tail;                // the last of what came, in which a secret may begin
    std::string before, held;        // records: the last one passed on, and one that is to go after the next
    std::vector<std::string> first;  // records
    size_t n_records = 0;
    size_t n_plain = 0;   // of the Hello, to come yet
    bool is_raw = false;  // what comes is no records: nothing is encrypted
  };

  // Whether there is something at the descriptor; false when the test ends.
  bool await(const std::array<int, 2>& fds, size_t n, size_t* ready) {
    std::array<pollfd, 3> waits{};
    waits[0] = {wake_.fd(), POLLIN, 0};
    for (size_t i = 0; i < n; ++i) waits[i + 1] = {fds[i], POLLIN, 0};
    poll(waits.data(), n + 1, -1);
    for (size_t i = 0; i < n; ++i) {
      if (waits[i + 1].revents != 0) *ready = i;
    }
    return !is_closing_;
  }

  void run() {
    size_t ready = 0;
    if (!await({listener_.get(), 0}, 1, &ready)) return;
    const UniqueFd near(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const UniqueFd far(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_in at = at_loopback(target_);
    if (!near || connect(far.get(), reinterpret_cast<const sockaddr*>(&at), sizeof at) != 0) return;
    const timeval patience{0, 20'000};  // the end of the test is not waited for by who takes nothing
    ends_ = {near.get(), far.get()};
    for (const int end : ends_) setsockopt(end, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    directions_[0].n_plain = sizeof(Hello);
    std::string buffer(64 << 10, '\0');
    while (await(ends_, 2, &ready)) {
      const ssize_t n = recv(ends_[ready], buffer.data(), buffer.size(), MSG_DONTWAIT);
      if (n == 0 || (n < 0 && errno != EAGAIN)) return;
      if (n > 0 && !take(ready, {buffer.data(), static_cast<size_t>(n)})) return;
    }
  }

  bool take(size_t direction, std::string_view bytes) {
    Direction& way = directions_[direction];
    const std::string seen = way.tail + std::string(bytes);
    if (seen.find(secret_) != std::string::npos) has_read_secret_ = true;
    way.tail = seen.substr(seen.size() - std::min(seen.size(), secret_.size()));
    way.waiting.append(bytes);
    if (way.n_plain > 0) {
      if (way.waiting.size() < way.n_plain) return true;
      if (!send_all(direction, way.waiting.substr(0, way.n_plain))) return false;
      way.waiting.erase(0, std::exchange(way.n_plain, 0));
    }
    while (way.waiting.size() >= RecordCipher::kLengthBytes || way.is_raw) {
      if (way.is_raw) return send_all(direction, std::exchange(way.waiting, {}));
      uint32_t length;
      std::memcpy(&length, way.waiting.data(), sizeof length);
      const size_t size = length + RecordCipher::kOverhead;
      way.is_raw = length > RecordCipher::kMostBytes;
      if (way.is_raw) continue;
      if (way.waiting.size() < size) break;
      std::string record = way.waiting.substr(0, size);
      way.waiting.erase(0, size);
      if (!pass_on(direction, std::move(record))) return false;
    }
    return true;
  }

  bool pass_on(size_t direction, std::string record) {
    Direction& way = directions_[direction];
    const bool is_chosen = direction == plan_.direction && way.n_records++ == plan_.number;
    const std::string original = record;
    if (way.first.size() < 24) way.first.push_back(original);
    if (is_chosen && !meddle(direction, &record)) return false;
    const std::string held = std::exchange(way.held, is_chosen ? way.held : std::string());
    const bool is_sent = send_all(direction, record) && (is_chosen || send_all(direction, held));
    way.before = original;
    return is_sent;
  }

  // False: the connection is to be cut.
  bool meddle(size_t direction, std::string* record) {
    Direction& way = directions_[direction];
    const size_t n_body = record->size() - RecordCipher::kOverhead;
    const auto flip = [&](size_t begin, size_t size) {
      (*record)[begin + plan_.dice / 8 % size] ^= static_cast<char>(1 << plan_.dice % 8);
    };
    has_meddled_ = plan_.what != Meddling::kNothing;
    switch (plan_.what) {
      case Meddling::kNothing:
        break;
      case Meddling::kFlipLength:
        flip(0, RecordCipher::kLengthBytes);
        break;
      case Meddling::kFlipBytes:
        flip(RecordCipher::kLengthBytes, n_body);
        break;
      case Meddling::kFlipTag:
        flip(RecordCipher::kLengthBytes + n_body, RecordCipher::kTagBytes);
        break;
      case Meddling::kLeaveOut:
        record->clear();
        break;
      case Meddling::kRepeat:
        *record += std::string(*record);
        break;
      case Meddling::kSwap:
        way.held = std::exchange(*record, {});
        break;
      case Meddling::kEarlier:
        has_meddled_ = !way.before.empty();
        if (has_meddled_) *record = way.before;
        break;
      case Meddling::kReflect: {
        const std::vector<std::string>& others = directions_[1 - direction].first;
        has_meddled_ = plan_.number < others.size();
        if (has_meddled_) *record = others[plan_.number];
        break;
      }
      case Meddling::kCut:
        send_all(direction, record->substr(0, record->size() / 2));
        return false;
    }
    return true;
  }

  bool send_all(size_t direction, const std::string& bytes) {
    for (size_t done = 0; done < bytes.size() && !is_closing_;) {
      const ssize_t n = send(ends_[1 - direction], bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
      if (n < 0 && errno != EAGAIN && errno != EINTR) return false;
      if (n > 0) done += static_cast<size_t>(n);
    }
    return !is_closing_;
  }

  const Plan plan_;
  const std::string secret_;
  const uint16_t target_;
  uint16_t port_ = 0;
  UniqueFd listener_;  // which tells the port
  Wakeup wake_;
  std::array<int, 2> ends_{};
  std::array<Direction, 2> directions_;
  std::atomic<bool> is_closing_{false}, has_meddled_{false}, has_read_secret_{false};
  std::thread thread_;
};

}  // namespace p2pkv::test
