#include "net/doorman.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "base/descriptors.h"
#include "net/packets.h"

namespace p2pkv {
namespace {

// At all doors: strangers must not have more descriptors of an engine's process for knowing more of its
// ports.
std::atomic<size_t> n_visitors{0};

}  // namespace

Doorman::Doorman(std::vector<UniqueFd> listeners, Rules rules, Admit admit)
    : listeners_(std::move(listeners)), rules_(rules), admit_(std::move(admit)) {}

Doorman::Doorman(UniqueFd listener, Rules rules, Admit admit)
    : Doorman(std::vector<UniqueFd>(), rules, std::move(admit)) {
  listeners_.push_back(std::move(listener));
}

bool Doorman::start(std::string* error) {
  if (thread_.start(rules_.thread_name, [this] { run(); })) return true;
  *error = "cannot start a thread for incoming connections";
  return false;
}

void Doorman::close() {
  stop_.set();
  thread_.join();
  // A forked child may keep it open: who knocks then must be refused, and not wait for nobody.
  for (const UniqueFd& listener : listeners_) {
    if (getpid() == pid_) shutdown(listener.get(), SHUT_RDWR);
  }
  listeners_.clear();
  stop_.close();
}

void Doorman::run() {
  std::vector<pollfd> fds;
  for (;;) {
    fds.assign({{stop_.fd(), POLLIN, 0}});
    const auto knocks = static_cast<short>(is_out_of_fds_ ? 0 : POLLIN);
    for (const UniqueFd& listener : listeners_) fds.push_back({listener.get(), knocks, 0});
    const size_t first_visitor = fds.size();
    for (const Visitor& visitor : visitors_) fds.push_back({visitor.connection.get(), POLLIN, 0});
    if (poll(fds.data(), fds.size(), poll_ms()) < 0 && errno != EINTR) return;
    if (fds[0].revents) break;
    is_out_of_fds_ = false;

    size_t n_kept = 0;
    for (size_t i = 0; i < visitors_.size(); ++i) {
      Admitted peer;
      Verdict verdict = fds[first_visitor + i].revents ? hear(visitors_[i], &peer) : Verdict::kWaiting;
      if (verdict == Verdict::kAdmitted) admit_(std::move(visitors_[i].connection), peer);
      if (verdict != Verdict::kWaiting || visitors_[i].deadline.passed()) continue;
      if (n_kept != i) visitors_[n_kept] = std::move(visitors_[i]);
      ++n_kept;
    }
    visitors_.erase(visitors_.begin() + static_cast<std::ptrdiff_t>(n_kept), visitors_.end());
    count();
    for (size_t i = 0; i < listeners_.size(); ++i) {
      if (fds[1 + i].revents) accept_all(listeners_[i].get());
    }
  }
  visitors_.clear();
  count();
}

void Doorman::accept_all(int listener) {
  // A bound, so that a flood of connections can't keep those that wait from being heard.
  for (size_t i = 0; i < kMaxVisitors; ++i) {
    UniqueFd connection(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection) {
      if (errno == ECONNABORTED || errno == EINTR) continue;
      if (errno != EAGAIN) {
        // Out of descriptors or memory: the oldest visitor makes room, and the next try comes after a pause.
        drop_oldest();
        is_out_of_fds_ = true;
      }
      return;
    }
    if (rules_.same_user_only && !is_own_user(connection.get())) continue;
    const bool is_full = n_visitors >= share_of_descriptors(kMaxVisitors);
    if (is_full && visitors_.size() >= kOwnVisitors) drop_oldest();
    visitors_.push_back({std::move(connection), Deadline::after(kPatience), 0, {}});
    count();
  }
}

void Doorman::drop_oldest() {
  if (!visitors_.empty()) visitors_.erase(visitors_.begin());
  count();
}

void Doorman::count() {
  n_visitors += visitors_.size() - n_counted_;  // which may wrap, as sizes may
  n_counted_ = visitors_.size();
}

Doorman::Verdict Doorman::hear(Visitor& visitor, Admitted* peer) {
  auto* at = reinterpret_cast<uint8_t*>(&visitor.hello) + visitor.n_received;
  const ssize_t n = recv(visitor.connection.get(), at, sizeof(Hello) - visitor.n_received, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return Verdict::kWaiting;
  if (n <= 0) return Verdict::kDropped;
  visitor.n_received += static_cast<size_t>(n);
  if (visitor.n_received < sizeof(Hello)) return Verdict::kWaiting;
  const Hello& hello = visitor.hello;
  const bool is_ours = hello.magic == rules_.magic && hello.version == kFrameVersion;
  if (!is_ours || !tokens_.redeem(hello.token, &peer->grant, &peer->secret)) return Verdict::kDropped;
  peer->hello = hello;
  return Verdict::kAdmitted;
}

int Doorman::poll_ms() const {
  if (is_out_of_fds_) return 100;
  return visitors_.empty() ? -1 : std::max(1, visitors_.front().deadline.poll_ms());
}

}  // namespace p2pkv
