// A way between a tcp reader and its owner that a test cuts: what goes over a rail goes through a thread
// here.
#pragma once

#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "loopback_port.h"
#include "transports/tcp/frames.h"

namespace p2pkv::test {

class Relay {
 public:
  // From 127.0.0.`host` to its port `target`.
  Relay(uint8_t host, uint16_t target)
      : host_(host), target_(target), listener_(listen_at_loopback(&port_, 64, host)) {
    thread_ = std::thread([this] { run(); });
  }
  ~Relay() {
    is_closing_ = true;
    wake_.set();
    thread_.join();
  }
  uint16_t port() const { return port_; }
  uint64_t n_bytes() const { return n_bytes_; }

  // Passes nothing on any more, and says so to nobody.
  void cut() { is_cut_ = true; }
  // Holds back what comes until so long from now.
  void hold(std::chrono::milliseconds how_long) {
    held_until_ns_ = (std::chrono::steady_clock::now() + how_long).time_since_epoch().count();
  }
  // Cuts itself when so many more bytes have gone through.
  void cut_after(uint64_t n_bytes) { cut_at_ = n_bytes_ + n_bytes; }
  void reset_after(uint64_t n_bytes) { reset_at_ = n_bytes_ + n_bytes; }
  // Passes on at most so many bytes a millisecond; 0: as fast as can be.
  void slow(uint64_t bytes_a_ms) { bytes_a_ms_ = bytes_a_ms; }
  // What was on its way comes late.
  void heal() {
    cut_at_ = reset_at_ = UINT64_MAX;
    bytes_a_ms_ = 0;
    held_until_ns_ = 0;
    is_cut_ = false;
    wake_.set();
  }

 private:
  void run() {
    while (!is_closing_) {
      std::vector<pollfd> fds = {{wake_.fd(), POLLIN, 0}};
      if (!is_silent()) {
        fds.push_back({listener_.get(), POLLIN, 0});
        for (const auto& [end, other] : pairs_) fds.push_back({end, POLLIN, 0});
      }
      poll(fds.data(), fds.size(), fds.size() > 1 ? 20 : 1);
      wake_.clear();
      if (is_silent()) continue;
      for (size_t i = 2; i < fds.size() && !is_silent(); ++i) {
        if (fds[i].revents != 0 && pairs_.contains(fds[i].fd)) pass_on(fds[i].fd);
      }
      if (fds.size() > 1 && fds[1].revents != 0) admit();
    }
    while (!pairs_.empty()) drop(pairs_.begin()->first, false);
  }

  bool is_silent() const {
    return is_cut_ || std::chrono::steady_clock::now().time_since_epoch().count() < held_until_ns_;
  }

  void admit() {
    const int near = accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC);
    const int far = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in at = at_loopback(target_, host_);
    if (near < 0 || connect(far, reinterpret_cast<const sockaddr*>(&at), sizeof at) != 0) {
      ::close(near);
      ::close(far);
      return;
    }
    const int on = 1;
    const timeval patience{1, 0};
    for (const int end : {near, far}) {
      setsockopt(end, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      setsockopt(end, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    }
    pairs_[near] = far;
    pairs_[far] = near;
  }

  void pass_on(int from) {
    const ssize_t n = recv(from, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return drop(from, false);
    n_bytes_ += static_cast<uint64_t>(n);
    if (n_bytes_ >= reset_at_) {
      reset_at_ = UINT64_MAX;
      while (!pairs_.empty()) drop(pairs_.begin()->first, true);
      return;
    }
    if (n_bytes_ >= cut_at_) is_cut_ = true;  // these still go
    for (ssize_t done = 0; done < n;) {
      const ssize_t m =
          send(pairs_[from], buffer_.data() + done, static_cast<size_t>(n - done), MSG_NOSIGNAL);
      if (m <= 0) return drop(from, false);
      done += m;
    }
    const uint64_t rate = bytes_a_ms_;
    if (rate > 0)
      std::this_thread::sleep_for(std::chrono::microseconds(static_cast<uint64_t>(n) * 1000 / rate));
  }

  void drop(int end, bool is_reset) {
    const int other = pairs_[end];
    const linger at_once{1, 0};
    for (const int each : {end, other}) {
      if (is_reset) setsockopt(each, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
      pairs_.erase(each);
      ::close(each);
    }
  }

  const uint8_t host_;
  const uint16_t target_;
  uint16_t port_ = 0;
  UniqueFd listener_;  // which tells the port
  Wakeup wake_;
  std::map<int, int> pairs_;
  std::vector<char> buffer_ = std::vector<char>(64 << 10);
  std::atomic<bool> is_cut_{false}, is_closing_{false};
  std::atomic<int64_t> held_until_ns_{0};
  std::atomic<uint64_t> n_bytes_{0}, cut_at_{UINT64_MAX}, reset_at_{UINT64_MAX}, bytes_a_ms_{0};
  std::thread thread_;
};

// An owner's half of a handshake, as its reader sees it who is to go through relays, one for each address.
inline std::string through(std::string half, const std::vector<uint16_t>& ports) {
  tcp::EndpointBlob first;
  std::memcpy(&first, half.data(), sizeof first);
  const size_t more = sizeof first + first.n_tokens * size_t{32};
  CHECK_EQ(static_cast<size_t>(first.more & ~tcp::kTakesMore) + 1, ports.size());
  first.port = ports[0];
  std::memcpy(half.data(), &first, sizeof first);
  for (size_t i = 1; i < ports.size(); ++i) {
    char* at = half.data() + more + (i - 1) * sizeof(tcp::AddressBlob);
    std::memcpy(at + offsetof(tcp::AddressBlob, port), &ports[i], sizeof ports[i]);
  }
  return half;
}

}  // namespace p2pkv::test
