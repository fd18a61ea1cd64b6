#include "directory/channel.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>

#include "net/listener.h"
#include "net/sealed_door.h"

namespace p2pkv {

using wire::Header;
using wire::Kind;
using wire::ReplyStatus;

// Measured between two processes of a two-core virtual machine, with 300 us of work between the questions: 93
// us a question when both sides sleep, 55 us when the asking one does not; what takes longer than this comes
// from a busy machine, where spinning only takes the answer's core.
static constexpr std::chrono::microseconds kSpin{60};

// Lets half of the cores be spun on, at least one, as long as no more calls than that wait for answers: the
// others have answers to give, and calls to make.
class SpinPermit {
 public:
  SpinPermit() { n_waiting_.fetch_add(1, std::memory_order_relaxed); }
  ~SpinPermit() { n_waiting_.fetch_sub(1, std::memory_order_relaxed); }
  SpinPermit(const SpinPermit&) = delete;
  SpinPermit& operator=(const SpinPermit&) = delete;
  bool holds() const {
    static const unsigned most = std::max(1u, std::thread::hardware_concurrency() / 2);
    return n_waiting_.load(std::memory_order_relaxed) <= most;
  }

 private:
  static inline std::atomic<unsigned> n_waiting_{0};
};

DirectoryExchange::DirectoryExchange(AskBatch& batch, const DirectoryQuestion& question,
                                     const std::vector<DirectoryLine>& lines)
    : batch_(batch), question_(question) {
  for (const DirectoryLine& line : lines) lines_.push_back({line.channel, line.owner, {}, false});
  send_unsealed();
}

void DirectoryExchange::wait(const Deadline& deadline, const Deadline& patience) {
  std::optional<SpinPermit> permit;
  if (question_.kind != Kind::kPromote) spin(permit.emplace());  // a promotion waits for a disk
  while (!batch_.is_settled() && is_any_waiting()) {
    const bool is_patient = !patience.passed();
    if (deadline.passed() || (!is_patient && batch_.is_heard())) break;
    const Deadline& until = is_patient && patience.at() < deadline.at() ? patience : deadline;
    wait_until(Deadline::until(std::min(until.at(), hurry())));
  }
}

std::vector<uint8_t> DirectoryExchange::end(const Deadline& patience) {
  const bool is_needed = patience.passed() || !batch_.is_settled();
  std::vector<uint8_t> is_usable;
  for (Line& line : lines_) {
    auto& late = line.channel->late_;
    for (const Sent& sent : line.waiting) {
      late.push_back(sent.id);
      if (!is_needed) batch_.excuse(sent.ask);
    }
    // Behind a promotion that is not answered the owner hears no question.
    const bool is_heard = line.waiting.empty() || question_.kind != Kind::kPromote;
    is_usable.push_back(!line.is_lost && is_heard && late.size() <= kMostLate ? 1 : 0);
    line.waiting.clear();
  }
  return is_usable;
}

bool DirectoryExchange::is_any_waiting() const {
  return std::any_of(lines_.begin(), lines_.end(), [](const Line& line) { return !line.waiting.empty(); });
}

void DirectoryExchange::send_unsealed() {
  // An ask that is refused may have others asked.
  for (size_t ask = batch_.seal(); ask < batch_.asks().size(); ask = batch_.seal()) {
    for (const size_t end = batch_.asks().size(); ask < end; ++ask) send(ask);
  }
}

Deadline::Clock::time_point DirectoryExchange::hurry() {
  auto next = Deadline::Clock::time_point::max();
  for (Line& line : lines_) {
    for (const Sent& sent : line.waiting) {
      if (batch_.asks()[sent.ask].is_hurried) continue;
      if (sent.turn.passed()) {
        batch_.hurry(sent.ask);
      } else {
        next = std::min(next, sent.turn.at());
      }
    }
  }
  send_unsealed();
  return next;
}

void DirectoryExchange::send(size_t ask) {
  const AskBatch::Ask& asked = batch_.asks()[ask];
  const auto line = std::find_if(lines_.begin(), lines_.end(),
                                 [&asked](const Line& candidate) { return candidate.owner == asked.owner; });
  if (line == lines_.end()) return;
  if (line->is_lost) return batch_.refuse(ask);
  const uint64_t id = ++line->channel->last_id_;
  const bool is_located = question_.kind == Kind::kGet && line->channel->locates_;
  const Kind kind = is_located ? Kind::kLocate : question_.kind;
  std::string head;
  wire::append(head, Header{wire::kMagic, wire::kVersion, static_cast<uint16_t>(kind), id,
                            line->channel->boot_, static_cast<uint32_t>(asked.rows.size()),
                            is_located && question_.others != nullptr ? uint32_t{kMostHolders} : 0});
  line->stream().put(head, batch_.body(ask, question_.records, question_.record_size));
  line->waiting.push_back({ask, id, kind, Deadline::until(Deadline::Clock::now() + kTurn)});
  if (!line->stream().flush()) lose(*line);
}

// Waits awake for the first kSpin: a core that goes to sleep takes longer to wake than a look-up takes.
void DirectoryExchange::spin(const SpinPermit& permit) {
  const auto until = Deadline::Clock::now() + kSpin;
  while (permit.holds() && !batch_.is_settled() && is_any_waiting() && Deadline::Clock::now() < until) {
    for (Line& line : lines_) advance(line);
    send_unsealed();
  }
}

void DirectoryExchange::wait_until(const Deadline& until) {
  std::vector<pollfd> fds;
  for (const Line& line : lines_) {
    const short events = line.stream().has_outgoing() ? POLLIN | POLLOUT : POLLIN;
    fds.push_back({line.waiting.empty() ? -1 : line.stream().fd(), events, 0});
  }
  poll(fds.data(), fds.size(), until.poll_ms());
  for (size_t i = 0; i < fds.size(); ++i) {
    if (fds[i].revents != 0) advance(lines_[i]);
  }
  send_unsealed();
}

void DirectoryExchange::advance(Line& line) {
  if (line.waiting.empty()) return;
  if (!line.stream().flush()) return lose(line);
  while (!line.waiting.empty()) {
    const auto progress = line.stream().receive();
    if (progress == SealedStream::Progress::kLost) return lose(line);
    if (progress == SealedStream::Progress::kBlocked) return;
    take(line, line.stream().message());
  }
}

void DirectoryExchange::take(Line& line, std::string_view message) {
  wire::Reader body(message);
  const auto header = body.value<Header>();
  auto& late = line.channel->late_;
  const Sent sent = line.waiting.front();
  const uint64_t next_id = late.empty() ? sent.id : late.front();
  if (!header || header->magic != wire::kMagic || header->request_id != next_id) return lose(line);
  if (!late.empty()) {
    line.channel->skip(*header);
    return;
  }
  line.waiting.pop_front();
  const bool is_ok = header->version == wire::kVersion &&
                     header->status == static_cast<uint32_t>(ReplyStatus::kOk) &&
                     header->count == batch_.asks()[sent.ask].rows.size();
  if (!is_ok) {
    batch_.refuse(sent.ask);
  } else if (question_.found != nullptr && question_.locations == nullptr) {
    batch_.take_flags(sent.ask, body.rest(), question_.found);
  } else if (sent.kind == Kind::kLocate || sent.kind == Kind::kHeld) {
    take_located(batch_, question_, sent.ask, body.rest());
  } else if (question_.found != nullptr) {
    batch_.take_found(sent.ask, body.rest(), question_.found, question_.locations);
  } else {
    batch_.acknowledge(sent.ask);
  }
}

bool take_located(AskBatch& batch, const DirectoryQuestion& question, size_t ask, std::string_view reply) {
  std::vector<AskBatch::RowHolders> others;
  std::vector<uint32_t> alone;  // what nobody else has, as far as this call was told
  if (question.others != nullptr) {
    const std::vector<uint32_t>& rows = batch.asks().at(ask).rows;
    for (size_t i = 0; i < std::min(rows.size(), reply.size()); ++i) {
      if (reply[i] == 1 && question.found[rows[i]] == 0) alone.push_back(rows[i]);
    }
  }
  const bool is_good = batch.take_located(ask, reply, question.found, question.locations,
                                          question.others != nullptr ? &others : nullptr);
  if (!is_good || question.others == nullptr) return is_good;
  const auto note = [&question](size_t row, const Location* locations, size_t n) {
    Key key;
    std::memcpy(&key, question.records + row * question.record_size, sizeof key);
    question.others->put(key, locations, n);
  };
  for (const auto& [row, locations] : others) note(row, locations.data(), locations.size());
  for (const uint32_t row : alone) note(row, nullptr, 0);  // what was known is older than this
  return true;
}

void DirectoryExchange::lose(Line& line) {
  for (const Sent& sent : line.waiting) batch_.refuse(sent.ask);
  line.waiting.clear();
  line.is_lost = true;
}

std::string DirectoryChannel::request() {
  return ask_for_door(kDirectoryDoor);
}

std::shared_ptr<DirectoryChannel> DirectoryChannel::open(std::string_view door, uint64_t boot, double timeout,
                                                         std::string* error) {
  const Deadline deadline = Deadline::after(timeout);
  auto stream = knock(kDirectoryDoor, door, error);
  if (!stream) return nullptr;
  // Asked for nothing, a shard that has the key answers: MALFORMED if it does not know LOCATE yet.
  std::string nothing;
  wire::append(nothing,
               Header{wire::kMagic, wire::kVersion, static_cast<uint16_t>(Kind::kLocate), 0, boot, 0, 0});
  stream->put(nothing, {});
  const auto progress = receive_by(*stream, deadline);
  if (progress == SealedStream::Progress::kFrame) {
    const auto header = wire::Reader(stream->message()).value<Header>();
    const bool locates = header && header->status == static_cast<uint32_t>(ReplyStatus::kOk);
    return std::make_shared<DirectoryChannel>(std::move(stream), boot, locates);
  }
  *error = progress == SealedStream::Progress::kLost ? "it hung up or refused" : "it does not answer";
  return nullptr;
}

DirectoryChannel::DirectoryChannel(std::unique_ptr<SealedStream> stream, uint64_t boot, bool locates)
    : stream_(std::move(stream)), boot_(boot), locates_(locates), pid_(getpid()) {}

DirectoryChannel::~DirectoryChannel() = default;

bool DirectoryChannel::release(uint64_t lease) {
  std::string message;
  wire::append(message, Header{wire::kMagic, wire::kVersion, static_cast<uint16_t>(Kind::kRelease),
                               ++last_id_, boot_, 1, 0});
  wire::append(message, lease);
  stream_->put(message, {});
  return stream_->flush();
}

DirectoryChannel::Told DirectoryChannel::touch(const Key* keys, size_t n) {
  size_t n_told = 0;
  if (!take_late()) return {false, 0};
  while (n_told < n && knows_touches_ && late_.size() < kMostUnanswered) {
    const size_t n_keys = std::min(n - n_told, kTouchesAMessage);
    std::string head;
    wire::append(head, Header{wire::kMagic, wire::kVersion, static_cast<uint16_t>(Kind::kTouch), ++last_id_,
                              boot_, static_cast<uint32_t>(n_keys), 0});
    stream_->put(head, {reinterpret_cast<const char*>(keys + n_told), n_keys * sizeof(Key)});
    late_.push_back(last_id_);
    n_told += n_keys;
  }
  return {stream_->flush(), n_told};
}

bool DirectoryChannel::take_late() {
  if (!stream_->flush()) return false;
  while (!late_.empty()) {
    const auto progress = stream_->receive();
    if (progress != SealedStream::Progress::kFrame) return progress == SealedStream::Progress::kBlocked;
    const auto header = wire::Reader(stream_->message()).value<Header>();
    if (!header || header->magic != wire::kMagic || !skip(*header)) return false;
  }
  return true;
}

bool DirectoryChannel::skip(const Header& header) {
  if (header.request_id != late_.front()) return false;
  late_.pop_front();
  const bool is_of_touch =
      header.kind == (static_cast<uint16_t>(Kind::kTouch) | static_cast<uint16_t>(Kind::kReply));
  if (is_of_touch && header.status == static_cast<uint32_t>(ReplyStatus::kMalformed)) knows_touches_ = false;
  return true;
}

void DirectoryChannel::interrupt() {
  if (getpid() != pid_) return;  // a forked child shares the connection with its parent, who goes on using it
  stream_->shut_down();
}

}  // namespace p2pkv
