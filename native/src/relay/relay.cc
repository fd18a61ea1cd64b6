#include "relay/relay.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <charconv>

#include "base/clock.h"

namespace p2pkv {
namespace {

constexpr uint64_t kClientBit = 1;

UniqueFd copy_of(int fd) {
  return UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0));
}

bool would_block() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

}  // namespace

Relay::Relay() : epoll_(epoll_create1(EPOLL_CLOEXEC)), read_(kRead) {}

uint64_t Relay::add(int engine, int client, std::shared_ptr<AnswerBody> body,
                    std::shared_ptr<EventStream> events, std::shared_ptr<const Patience> patience,
                    double client_patience) {
  Stream stream{copy_of(engine),     copy_of(client), std::move(body), std::move(events),
                std::move(patience), client_patience, steady_now_ns(), {}};
  const uint64_t name = last_name_ + 1;
  if (!stream.engine || !stream.client || !watch(name, stream, true)) return kNone;
  last_name_ = name;
  streams_.emplace(name, std::move(stream));
  return name;
}

std::vector<Relay::Ended> Relay::run() {
  std::array<epoll_event, kMostReady> ready;
  const int n = epoll_wait(epoll_.get(), ready.data(), kMostReady, 0);
  now_ = steady_now_ns();
  for (int i = 0; i < n; ++i) {
    const uint64_t name = ready[i].data.u64 >> 1;
    const auto found = streams_.find(name);
    if (found == streams_.end() || found->second.is_reported) continue;
    if (ready[i].data.u64 & kClientBit)
      flush(name, found->second);
    else
      read(name, found->second);
  }
  return std::exchange(ended_, {});
}

std::vector<Relay::Ended> Relay::sweep() {
  now_ = steady_now_ns();
  for (auto& [name, stream] : streams_) {
    if (stream.is_reported) continue;
    const bool is_sending = !stream.unsent.empty();
    const double patience = is_sending ? stream.client_patience : stream.patience->now();
    if (static_cast<double>(now_ - stream.waits_since) > patience * 1e9)
      report(name, stream, is_sending ? End::kClientSlow : End::kEngineSilent);
  }
  return std::exchange(ended_, {});
}

std::string Relay::remove(uint64_t name) {
  const auto found = streams_.find(name);
  if (found == streams_.end()) return {};
  unwatch(found->second);
  std::string left = found->second.unsent.substr(found->second.n_sent);
  streams_.erase(found);
  return left;
}

bool Relay::watch(uint64_t name, const Stream& stream, bool engine) const {
  epoll_event event{};
  event.events = engine ? EPOLLIN : EPOLLOUT;
  event.data.u64 = name << 1 | (engine ? 0 : kClientBit);
  return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, (engine ? stream.engine : stream.client).get(), &event) == 0;
}

// Not left to closing: the owner's copies keep the descriptions open, and epoll with them.
void Relay::unwatch(const Stream& stream) const {
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, stream.engine.get(), nullptr);
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, stream.client.get(), nullptr);
}

void Relay::read(uint64_t name, Stream& stream) {
  const ssize_t n = recv(stream.engine.get(), read_.data(), read_.size(), MSG_DONTWAIT);
  if (n < 0 && would_block()) return;
  stream.waits_since = now_;
  payload_.clear();
  whole_.clear();
  if (n <= 0) {
    stream.body->close();
    if (!stream.body->is_complete()) end(stream, End::kHungUp);
  } else {
    const bool is_http = stream.body->feed({read_.data(), static_cast<size_t>(n)}, payload_);
    if (!stream.events->feed(payload_, whole_))
      end(stream, End::kTooLarge);
    else if (!is_http)
      end(stream, End::kNoHttp);
  }
  if (!stream.has_ended && stream.body->is_complete())
    end(stream, stream.events->is_done() && stream.events->is_between() ? End::kWhole : End::kEndedEarly);
  send(name, stream);
}

// Sends `whole_` as one chunk.
void Relay::send(uint64_t name, Stream& stream) {
  if (!whole_.empty()) {
    std::array<char, 18> size;
    char* end = std::to_chars(size.data(), size.data() + 16, whole_.size(), 16).ptr;
    *end++ = '\r';
    *end++ = '\n';
    const std::string_view head(size.data(), static_cast<size_t>(end - size.data()));
    whole_.append("\r\n");
    std::array<iovec, 2> pieces{{{size.data(), head.size()}, {whole_.data(), whole_.size()}}};
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = pieces.size();
    const ssize_t n = sendmsg(stream.client.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && !would_block()) return report(name, stream, End::kClientGone);
    const size_t n_sent = n < 0 ? 0 : static_cast<size_t>(n);
    if (n_sent < head.size() + whole_.size()) {
      stream.unsent.assign(head).append(whole_).erase(0, n_sent);
      // its engine waits as long: what it sends stays in the kernel's buffers, which have their limits
      unwatch(stream);
      if (!watch(name, stream, false)) report(name, stream, End::kClientGone);
      return;
    }
  }
  if (stream.has_ended) report(name, stream, stream.end);
}

void Relay::flush(uint64_t name, Stream& stream) {
  const std::string_view left = std::string_view(stream.unsent).substr(stream.n_sent);
  const ssize_t n = ::send(stream.client.get(), left.data(), left.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n < 0 && would_block()) return;
  if (n < 0) return report(name, stream, End::kClientGone);
  stream.n_sent += static_cast<size_t>(n);
  if (stream.n_sent < stream.unsent.size()) return;
  stream.unsent = {};
  stream.n_sent = 0;
  stream.waits_since = now_;
  unwatch(stream);
  if (stream.has_ended)
    report(name, stream, stream.end);
  else if (!watch(name, stream, true))
    report(name, stream, End::kHungUp);
}

void Relay::end(Stream& stream, End why) {
  stream.has_ended = true;
  stream.end = why;
}

// The owner hears of it once, and removes the stream.
void Relay::report(uint64_t name, Stream& stream, End why) {
  stream.is_reported = true;
  unwatch(stream);
  ended_.emplace_back(name, why);
}

}  // namespace p2pkv
