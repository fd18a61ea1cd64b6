#include "attach/attachment.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "base/copy.h"
#include "base/copy_team.h"
#include "net/packets.h"

namespace p2pkv::attaching {

std::optional<Seen> visit(const std::string& path, const Deadline& deadline, std::string* error) {
  const UniqueFd connection = knock(path, error);
  if (!connection) return std::nullopt;
  const Hello hello{kHelloMagic, kVersion, static_cast<uint16_t>(Purpose::kVisit), 0, 0};
  Welcome welcome;
  UniqueFd nothing;
  if (!greet(connection.get(), hello, -1, deadline, &welcome, &nothing, error)) return std::nullopt;
  welcome.address[kAddressBytes - 1] = '\0';
  welcome.cluster[kClusterBytes - 1] = '\0';
  return Seen{welcome.address, welcome.cluster, welcome.engine};
}

std::shared_ptr<Attachment> Attachment::open(const std::string& path, std::shared_ptr<MappedRegion> known,
                                             const Deadline& deadline, std::string* error, uint64_t mark) {
  UniqueFd connection = knock(path, error);
  if (!connection) return nullptr;
  auto made = std::shared_ptr<Attachment>(new Attachment(path, std::move(connection)),
                                          DeleteUnlessForked<Attachment>());
  const Hello hello{kHelloMagic, kVersion, static_cast<uint16_t>(Purpose::kEngine), mark, 0};
  UniqueFd area;
  if (!greet(made->connection_.get(), hello, -1, deadline, &made->welcome_, &area, error)) return nullptr;
  made->welcome_.address[kAddressBytes - 1] = '\0';
  made->welcome_.cluster[kClusterBytes - 1] = '\0';
  made->area_ = ReadOnlyMapping::map(area.get(), area_nbytes<HostArea>(), error);
  if (!made->area_ || !made->hear_of_pool(std::move(known), deadline, error)) return nullptr;
  return made;
}

bool Attachment::hear_of_pool(std::shared_ptr<MappedRegion> known, const Deadline& deadline,
                              std::string* error) {
  UniqueFd fds[kPoolParts];
  for (uint32_t part = 0; part < kPoolParts;) {
    ShownPart shown;
    *error = "the node there does not show its pool";
    if (!wait_readable(connection_.get(), deadline)) return false;
    const Received received = receive_packet(connection_.get(), &shown, &fds[part]);
    if (received == Received::kNothing) continue;
    if (received != Received::kPacket || shown.magic != kPoolMagic || shown.part != part) return false;
    ++part;
  }
  pool_ = MappedPool::map(fds[0].get(), fds[1].get(), fds[2].get(), std::move(known), error);
  if (!pool_) return false;
  shown_pool_ = pool_;
  pool_->find_guests_until(std::shared_ptr<const int64_t>(area_, &shown().guests_believed_until));
  return true;
}

void Attachment::close() {
  if (getpid() != pid_) return;  // in a forked child all of it is the parent's
  is_closing_ = true;
  wake_.set();
  shutdown(connection_.get(), SHUT_RDWR);
  telling_.close();
  const std::lock_guard lock(mutex_);
  for (EngineLine* line : borrowed_) line->interrupt();
  idle_.clear();
  given_back_.notify_all();
}

bool Attachment::wait_gone(const Deadline& deadline) {
  for (;;) {
    if (is_closing_) return true;
    const int16_t room = send_forgets() ? 0 : POLLOUT;
    // Replies are for `tell`; a hang-up is seen whether or not they are asked for.
    pollfd fds[] = {{wake_.fd(), POLLIN, 0}, {connection_.get(), static_cast<int16_t>(POLLRDHUP | room), 0}};
    poll(fds, 2, deadline.poll_ms());
    if (is_closing_ || (fds[1].revents & ~POLLOUT) != 0) return true;
    if (deadline.passed()) return false;  // and who waits on is still to be woken
    if (fds[0].revents != 0) wake_.clear();
  }
}

// --- lines

size_t Attachment::most_lines() const {
  return std::min<size_t>(load_word_of(shown().most_requests), kMostLines);
}

std::unique_ptr<EngineLine> Attachment::borrow(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (is_closing_) return nullptr;
    if (!idle_.empty()) {
      auto line = std::move(idle_.back());
      idle_.pop_back();
      borrowed_.push_back(line.get());
      return line;
    }
    if (borrowed_.size() + n_opening_ < most_lines()) break;
    // Not by what the wait returns: who was told of a line takes it, though his time is over.
    if (deadline.passed()) return nullptr;
    given_back_.wait_until(lock, deadline.at());
  }
  ++n_opening_;
  lock.unlock();
  std::string error;
  auto line = EngineLine::open(path_, welcome_, deadline, &error);
  lock.lock();
  --n_opening_;
  if (!line || is_closing_) {
    given_back_.notify_one();
    return nullptr;
  }
  borrowed_.push_back(line.get());
  return line;
}

void Attachment::call_ahead() {
  const std::lock_guard lock(mutex_);
  if (!idle_.empty()) idle_.back()->call_ahead();
}

void Attachment::give_back(std::unique_ptr<EngineLine> line, bool is_usable) {
  if (!is_usable && line->staging) forget(line->staging_number);
  const std::lock_guard lock(mutex_);
  std::erase(borrowed_, line.get());
  if (is_usable && !is_closing_) idle_.push_back(std::move(line));
  given_back_.notify_one();
}

class Attachment::BorrowedLine {
 public:
  BorrowedLine(Attachment& from, const Deadline& deadline) : from_(from), line_(from.borrow(deadline)) {}
  ~BorrowedLine() {
    if (line_) from_.give_back(std::move(line_), is_usable);
  }
  BorrowedLine(const BorrowedLine&) = delete;
  BorrowedLine& operator=(const BorrowedLine&) = delete;

  explicit operator bool() const { return line_ != nullptr; }
  EngineLine& operator*() { return *line_; }

  bool is_usable = true;

 private:
  Attachment& from_;
  std::unique_ptr<EngineLine> line_;
};

// --- requests

// Asks of `n` pages from `first` on, whose pieces, for a publish, are in the request already. False if there
// is no answer, which changes nothing of what was answered before: then there is no use in asking on.
bool Attachment::ask_round(EngineLine& line, RequestKind kind, const PageBatch& batch, size_t first, size_t n,
                           const Deadline& deadline, Answer* answer, bool* is_usable) {
  RequestArea& request = line.request();
  request.kind = static_cast<uint32_t>(kind);
  request.n_pages = static_cast<uint32_t>(n);
  request.n_pieces = static_cast<uint32_t>(batch.n_pieces);
  request.timeout_ns = std::chrono::nanoseconds(deadline.at() - Deadline::Clock::now()).count();
  std::copy_n(batch.keys + first, n, request.keys);
  const EngineLine::Asked asked = line.ask(deadline);
  if (asked != EngineLine::Asked::kAnswered || line.answer().n_pages != n) {
    answer->is_lost = asked == EngineLine::Asked::kLost;
    *is_usable = !answer->is_lost;
    return false;
  }
  if (kind == RequestKind::kMissed || kind == RequestKind::kFinds) return true;
  const AnswerArea& given = line.answer();
  answer->is_draining = given.is_draining != 0;
  std::copy_n(given.is_found, n, answer->is_found.begin() + static_cast<ptrdiff_t>(first));
  std::copy_n(given.locations, n, answer->locations.begin() + static_cast<ptrdiff_t>(first));
  if (kind == RequestKind::kLookUp) return true;
  for (size_t i = 0; i < n; ++i) answer->statuses[first + i] = static_cast<PoolStatus>(given.statuses[i]);
  std::copy_n(given.is_told, n, answer->is_told.begin() + static_cast<ptrdiff_t>(first));
  std::fill_n(answer->sequences.begin() + static_cast<ptrdiff_t>(first), n, given.sequence);
  return true;
}

bool Attachment::ask_of_keys(EngineLine& line, RequestKind kind, const Key* keys, size_t n,
                             const Deadline& deadline, Answer* answer, bool* is_usable) {
  const PageBatch batch{n, 1, keys, nullptr};
  for (size_t first = 0; first < n; first += kMaxPages) {
    const size_t n_round = std::min(n - first, kMaxPages);
    if (ask_round(line, kind, batch, first, n_round, deadline, answer, is_usable)) continue;
    std::fill(answer->statuses.begin() + static_cast<ptrdiff_t>(first), answer->statuses.end(),
              PoolStatus::kTimedOut);
    return false;
  }
  return true;
}

Attachment::Answer Attachment::ask_alone(RequestKind kind, const Key* keys, size_t n,
                                         const Deadline& deadline) {
  Answer answer(n);
  BorrowedLine line(*this, deadline);
  if (line) {
    ask_of_keys(*line, kind, keys, n, deadline, &answer, &line.is_usable);
  } else {
    answer.is_lost = !deadline.passed();
    // As many as may be were under way all the time.
    if (!answer.is_lost) std::fill(answer.statuses.begin(), answer.statuses.end(), PoolStatus::kTimedOut);
  }
  return answer;
}

void Attachment::tell_finds(const Key* keys, const Finds* finds, size_t n, const Deadline& deadline) {
  n = std::min(n, kMaxPages);
  if (n == 0) return;
  BorrowedLine line(*this, deadline);
  if (!line) return;
  Answer answer(n);
  std::copy_n(finds, n, (*line).request().finds);
  ask_of_keys(*line, RequestKind::kFinds, keys, n, deadline, &answer, &line.is_usable);
}

// How many pages from `first` on go into one request.
size_t Attachment::round_of(const PageBatch& batch, size_t first, bool is_staged) {
  const size_t most = std::max<size_t>(1, std::min(kMaxPages, kMaxPieces / batch.n_pieces));
  size_t n = 0;
  uint64_t nbytes = 0;
  while (first + n < batch.n_pages && n < most) {
    nbytes += batch.length_of(first + n);
    if (is_staged && n > 0 && nbytes > kStagingBytes) break;
    ++n;
  }
  return n;
}

Attachment::Answer Attachment::publish(const PageBatch& batch, const Deadline& deadline) {
  Answer answer(batch.n_pages);
  BorrowedLine line(*this, deadline);
  if (!line || batch.n_pieces > kMaxPieces) {
    answer.is_lost = line || !deadline.passed();
    // As many as may be were under way all the time.
    if (!answer.is_lost) std::fill(answer.statuses.begin(), answer.statuses.end(), PoolStatus::kTimedOut);
    return answer;
  }
  std::vector<MemoryPiece> places;
  const bool is_staged = !place(batch, &places);
  if (is_staged || round_of(batch, 0, false) < batch.n_pages) {
    // All of it is looked at before anything of it is stored, as if it were one request.
    Answer known(batch.n_pages);
    if (!ask_of_keys(*line, RequestKind::kLookUp, batch.keys, batch.n_pages, deadline, &known,
                     &line.is_usable)) {
      answer.is_lost = known.is_lost;
      std::fill(answer.statuses.begin(), answer.statuses.end(), PoolStatus::kTimedOut);
      return answer;
    }
    bool lengths_agree = true;
    for (size_t i = 0; i < batch.n_pages; ++i) {
      if (known.is_found[i] == 0 || known.locations[i].length == batch.length_of(i)) continue;
      answer.statuses[i] = PoolStatus::kOtherLength;
      answer.locations[i] = known.locations[i];
      lengths_agree = false;
    }
    if (!lengths_agree) return answer;
  }
  const auto publish_round = [&](size_t first, size_t n) {
    if (is_staged) {
      if (!stage(*line, batch, first, n, deadline)) return false;
    } else {
      std::copy_n(places.begin() + static_cast<ptrdiff_t>(first * batch.n_pieces), n * batch.n_pieces,
                  (*line).request().pieces);
    }
    return ask_round(*line, RequestKind::kPublish, batch, first, n, deadline, &answer, &line.is_usable);
  };
  std::vector<size_t> rounds;  // where each that was published begins
  size_t next = 0;
  bool is_answered = true, is_all_there = true;
  while (next < batch.n_pages && is_answered && is_all_there) {
    const size_t n = round_of(batch, next, is_staged);
    is_answered = publish_round(next, n);
    if (!is_answered) break;
    rounds.push_back(next);
    next += n;
    is_all_there = rounds.size() == 1 || drop_gone(batch, &answer) == 0;
  }
  std::fill(answer.statuses.begin() + static_cast<ptrdiff_t>(next), answer.statuses.end(),
            is_answered ? PoolStatus::kNoRoom : PoolStatus::kTimedOut);
  if (is_all_there) return answer;
  // There is no room for all: what was published last took the place of the front, which is worth most. So
  // that goes again, last of all.
  for (size_t k = rounds.size() - 1; k-- > 0;) {
    if (!publish_round(rounds[k], rounds[k + 1] - rounds[k])) break;
  }
  drop_gone(batch, &answer);
  return answer;
}

// Has the pages of a batch be there no more that have gone since the node answered for them. Returns how many
// those are.
size_t Attachment::drop_gone(const PageBatch& batch, Answer* answer) const {
  const size_t n = batch.n_pages;
  std::vector<uint8_t> is_there(n), is_seen(n);
  std::vector<Location> locations(n);
  if (const auto pool = shown_pool_.lock()) {
    // A look may miss a page whose neighbours in the index come and go: two are not likely to.
    for (auto* const seen : {&is_there, &is_seen}) {
      pool->lookup(batch.keys, n, seen->data(), locations.data(), MappedPool::Find::kGuestsToo);
    }
  }
  size_t n_gone = 0;
  for (size_t i = 0; i < n; ++i) {
    if (answer->is_found[i] == 0 || is_there[i] != 0 || is_seen[i] != 0) continue;
    answer->is_found[i] = 0;
    answer->statuses[i] = PoolStatus::kNoRoom;
    ++n_gone;
  }
  return n_gone;
}

// Copies pages into the line's staging, one after the other, and names these places in the request.
bool Attachment::stage(EngineLine& line, const PageBatch& batch, size_t first, size_t n,
                       const Deadline& deadline) {
  std::vector<uint64_t> offsets(n);
  uint64_t nbytes = 0;
  for (size_t i = 0; i < n; ++i) {
    offsets[i] = nbytes;
    nbytes += batch.length_of(first + i);
  }
  if (!make_staging(line, nbytes, deadline)) return false;
  const auto copy_page = [&](size_t i) {
    uint8_t* to = line.staging->base() + offsets[i];
    for (size_t k = 0; k < batch.n_pieces; ++k) {
      const Piece& piece = batch.pieces[(first + i) * batch.n_pieces + k];
      MemoryPiece& place = line.request().pieces[i * batch.n_pieces + k];
      place = {line.staging_number, 0, static_cast<uint64_t>(to - line.staging->base()),
               static_cast<uint64_t>(piece.nbytes)};
      copy_bytes(to, reinterpret_cast<const void*>(piece.address), static_cast<size_t>(piece.nbytes));
      to += piece.nbytes;
    }
  };
  return make_copies({n, nbytes, std::ref(copy_page)}, [&] { return deadline.passed() || is_closing_; }) == n;
}

bool Attachment::make_staging(EngineLine& line, uint64_t nbytes, const Deadline& deadline) {
  if (line.staging && line.staging->nbytes() >= nbytes) return true;
  std::string error;
  std::shared_ptr<SharedRegion> staging = SharedRegion::create(
      (std::max(nbytes, kStagingBytes) + kAreaAlignment - 1) / kAreaAlignment * kAreaAlignment, &error);
  if (!staging) return false;
  if (line.staging) forget(line.staging_number);
  line.staging.reset();
  line.staging_number = share(staging->nbytes(), staging->fd(), deadline, &error);
  if (line.staging_number == 0) return false;
  line.staging = std::move(staging);
  return true;
}

}  // namespace p2pkv::attaching
