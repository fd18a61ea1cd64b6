#include "p2pkv/directory_channel.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <thread>
#include <utility>

#include "../transports/listener.h"
#include "directory_frames.h"

namespace p2pkv {

using wire::Header;
using wire::Kind;
using wire::ReplyStatus;

namespace {

// Measured between two processes of a two-core virtual machine, with 300 us of work between the questions: 93
// us a question when both sides sleep, 55 us when the asking one does not; what takes longer than this comes
// from a busy machine, where spinning only takes the answer's core.
constexpr std::chrono::microseconds kSpin{60};

// Lets half of the cores be spun on, at least one: the others have answers to give.
class SpinPermit {
 public:
  SpinPermit()
      : is_granted_(n_spinning_.fetch_add(1) < std::max(1u, std::thread::hardware_concurrency() / 2)) {}
  ~SpinPermit() { n_spinning_.fetch_sub(1); }
  SpinPermit(const SpinPermit&) = delete;
  SpinPermit& operator=(const SpinPermit&) = delete;
  bool is_granted() const { return is_granted_; }

 private:
  static inline std::atomic<unsigned> n_spinning_{0};
  const bool is_granted_;
};

SealedStream::Progress receive_by(SealedStream& stream, const Deadline& deadline) {
  for (;;) {
    if (!stream.flush()) return SealedStream::Progress::kLost;
    const auto progress = stream.receive();
    if (progress != SealedStream::Progress::kBlocked || deadline.passed()) return progress;
    const short events = stream.has_outgoing() ? POLLIN | POLLOUT : POLLIN;
    pollfd waiting{stream.fd(), events, 0};
    poll(&waiting, 1, deadline.poll_ms());
  }
}

}  // namespace

// One call of `exchange`.
class DirectoryExchange {
 public:
  using Channels = std::vector<std::shared_ptr<DirectoryChannel>>;

  DirectoryExchange(AskBatch& batch, const DirectoryQuestion& question, const Channels& channels)
      : batch_(batch), question_(question), channels_(channels), is_waiting_(channels.size(), 1) {}

  std::vector<uint8_t> run(const Deadline& deadline, const Deadline& patience) {
    for (size_t ask = 0; ask < channels_.size(); ++ask) send(ask);
    spin();
    while (!batch_.is_settled() && is_any_waiting()) {
      const bool is_patient = !patience.passed();
      if (deadline.passed() || (!is_patient && batch_.is_heard())) break;
      wait_until(is_patient && patience.at() < deadline.at() ? patience : deadline);
    }
    std::vector<uint8_t> is_usable(channels_.size());
    for (size_t ask = 0; ask < channels_.size(); ++ask) {
      is_usable[ask] = is_waiting_[ask] == 0 && is_lost_[ask] == 0 ? 1 : 0;
    }
    return is_usable;
  }

 private:
  SealedStream& stream(size_t ask) { return *channels_[ask]->stream_; }
  bool is_any_waiting() const {
    return std::any_of(is_waiting_.begin(), is_waiting_.end(), [](uint8_t waiting) { return waiting != 0; });
  }

  void send(size_t ask) {
    DirectoryChannel& channel = *channels_[ask];
    const auto n = static_cast<uint32_t>(batch_.asks()[ask].rows.size());
    std::string head;
    wire::append(head, Header{wire::kMagic, wire::kVersion, static_cast<uint16_t>(question_.kind),
                              ++channel.last_id_, channel.boot_, n, 0});
    stream(ask).put(head, batch_.body(ask, question_.records, question_.record_size));
    if (!stream(ask).flush()) lose(ask);
  }

  // Waits awake for the first kSpin: a core that goes to sleep takes longer to wake than a look-up takes.
  void spin() {
    const SpinPermit permit;
    if (!permit.is_granted()) return;
    const auto until = Deadline::Clock::now() + kSpin;
    while (!batch_.is_settled() && is_any_waiting() && Deadline::Clock::now() < until) {
      for (size_t ask = 0; ask < channels_.size(); ++ask) {
        if (is_waiting_[ask] != 0) advance(ask);
      }
    }
  }

  void wait_until(const Deadline& until) {
    std::vector<pollfd> fds;
    std::vector<size_t> asks;
    for (size_t ask = 0; ask < channels_.size(); ++ask) {
      if (is_waiting_[ask] == 0) continue;
      const short events = stream(ask).has_outgoing() ? POLLIN | POLLOUT : POLLIN;
      fds.push_back({stream(ask).fd(), events, 0});
      asks.push_back(ask);
    }
    poll(fds.data(), fds.size(), until.poll_ms());
    for (size_t i = 0; i < fds.size(); ++i) {
      if (fds[i].revents != 0) advance(asks[i]);
    }
  }

  void advance(size_t ask) {
    if (!stream(ask).flush()) return lose(ask);
    while (is_waiting_[ask] != 0) {
      const auto progress = stream(ask).receive();
      if (progress == SealedStream::Progress::kLost) return lose(ask);
      if (progress == SealedStream::Progress::kBlocked) return;
      take(ask, stream(ask).message());
    }
  }

  void take(size_t ask, std::string_view message) {
    wire::Reader body(message);
    const auto header = body.value<Header>();
    // One request at a time: an answer to another one can only be nonsense.
    if (!header || header->magic != wire::kMagic || header->request_id != channels_[ask]->last_id_)
      return lose(ask);
    is_waiting_[ask] = 0;
    const bool is_ok = header->version == wire::kVersion &&
                       header->status == static_cast<uint32_t>(ReplyStatus::kOk) &&
                       header->count == batch_.asks()[ask].rows.size();
    if (!is_ok) {
      batch_.refuse(ask);
    } else if (question_.found != nullptr) {
      batch_.take_found(ask, body.rest(), question_.found, question_.locations);
    } else {
      batch_.acknowledge(ask);
    }
  }

  void lose(size_t ask) {
    is_waiting_[ask] = 0;
    is_lost_[ask] = 1;
    batch_.refuse(ask);
  }

  AskBatch& batch_;
  const DirectoryQuestion& question_;
  const Channels& channels_;
  std::vector<uint8_t> is_waiting_;
  std::vector<uint8_t> is_lost_ = std::vector<uint8_t>(is_waiting_.size());
};

std::string DirectoryChannel::request() {
  return to_blob(DirectoryRequestBlob{kDirectoryRequestMagic, kFrameVersion, 0});
}

std::shared_ptr<DirectoryChannel> DirectoryChannel::open(std::string_view door, uint64_t boot, double timeout,
                                                         std::string* error) {
  const Deadline deadline = Deadline::after(timeout);
  DirectoryDoorBlob blob;
  if (!from_blob(door, kDirectoryDoorMagic, &blob, error)) return nullptr;
  if (!SealedStream::is_available()) {
    *error = "the libzmq of pyzmq was built without libsodium";
    return nullptr;
  }
  Address address{blob.family, blob.port, blob.scope, {}};
  std::copy(std::begin(blob.address), std::end(blob.address), address.bytes);
  auto stream = std::make_unique<SealedStream>(start_connecting(address), blob.key, Side::kReader);
  stream->put_plain(to_blob(Hello{kDirectoryHelloMagic, kFrameVersion, 0, blob.token}));
  // Asked for nothing, a shard that has the key answers.
  std::string nothing;
  wire::append(nothing,
               Header{wire::kMagic, wire::kVersion, static_cast<uint16_t>(Kind::kGet), 0, boot, 0, 0});
  stream->put(nothing, {});
  const auto progress = receive_by(*stream, deadline);
  if (progress == SealedStream::Progress::kFrame) {
    return std::make_shared<DirectoryChannel>(std::move(stream), boot);
  }
  *error = progress == SealedStream::Progress::kLost ? "it hung up or refused" : "it does not answer";
  return nullptr;
}

DirectoryChannel::DirectoryChannel(std::unique_ptr<SealedStream> stream, uint64_t boot)
    : stream_(std::move(stream)), boot_(boot), pid_(getpid()) {}

DirectoryChannel::~DirectoryChannel() = default;

void DirectoryChannel::interrupt() {
  if (getpid() != pid_) return;  // a forked child shares the connection with its parent, who goes on using it
  shutdown(stream_->fd(), SHUT_RDWR);
}

std::vector<uint8_t> exchange(AskBatch& batch, const DirectoryQuestion& question,
                              const std::vector<std::shared_ptr<DirectoryChannel>>& channels,
                              Deadline deadline, Deadline patience) {
  return DirectoryExchange(batch, question, channels).run(deadline, patience);
}

}  // namespace p2pkv
