#include "attach/host_line.h"

#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "net/packets.h"
#include "page/page_checks.h"

namespace p2pkv::attaching {

// Asks the engine's word and shows it the node's, so that both agree on what becomes of a request, in
// whatever moment either of them stops.
class HostLine::Consented final : public Consent {
 public:
  Consented(const HostLine& line, uint64_t id) : line_(line), id_(id) {}

  bool is_withdrawn() override { return line_.is_withdrawn(id_); }
  bool begin_commit() override {
    // First the own word: an engine that withdraws from here on sees it, and one that has withdrawn before is
    // seen. Either way it knows that its memory is not looked at any more.
    store_word_of(line_.answer_->committing, id_);
    if (is_withdrawn()) return false;
    // Ahead of the answer, since waking takes as long as what is left to do. The engine goes back to sleep if
    // it wakes on this thread's core, which may be another one than at first.
    store_word_of(line_.answer_->is_awake, awake_here());
    line_.wake_engine();
    return true;
  }

 private:
  const HostLine& line_;
  const uint64_t id_;
};

std::unique_ptr<HostLine> HostLine::open(UniqueFd* connection, int request, EngineParts engine,
                                         const HostParts& parts, LineCounts& counts, Refusal* refusal) {
  auto line = std::unique_ptr<HostLine>(new HostLine(std::move(engine), parts, counts));
  std::string error;
  line->request_mapping_ = ReadOnlyMapping::map(request, area_nbytes<RequestArea>(), &error);
  *refusal = Refusal::kBadMemory;
  if (!line->request_mapping_) return nullptr;
  line->answer_region_ = SharedRegion::create(area_nbytes<AnswerArea>(), &error);
  *refusal = Refusal::kTooMany;
  if (!line->answer_region_) return nullptr;
  line->request_ = reinterpret_cast<const RequestArea*>(line->request_mapping_->base());
  line->answer_ = reinterpret_cast<AnswerArea*>(line->answer_region_->base());
  line->connection_ = std::move(*connection);
  *refusal = Refusal::kNone;
  return line;
}

bool HostLine::start(const std::atomic<bool>& is_draining, std::function<void()> ended) {
  is_draining_ = &is_draining;
  return thread_.start("p2pkv-line", [this, ended = std::move(ended)] {
    run();
    has_ended_ = true;
    ended();
  });
}

void HostLine::close() {
  is_closing_ = true;
  engine_.turns->wake();
  shutdown(connection_.get(), SHUT_RDWR);
  thread_.join();
}

bool HostLine::is_left() const {
  return has_ended_ || has_hung_up(connection_.get());
}

void HostLine::run() {
  Waiting waiting(connection_.get(), &answer_->is_awake, &request_->is_awake);
  for (;;) {
    const auto woken = waiting.until([&] { return is_asked(); }, Deadline::after(kNoHurry));
    if (woken == Waiting::Woken::kLate) continue;
    if (is_closing_ || woken == Waiting::Woken::kLost) break;
    last_id_ = load_word_of(request_->id);
    if (!answer(last_id_)) {
      ++counts_.n_refused;
      break;
    }
    store_word_of(answer_->answered, last_id_);
    if (!wake_engine()) break;
  }
  shutdown(connection_.get(), SHUT_RDWR);
  tell(untold_.take());
}

// False if that is no request that an engine writes.
bool HostLine::answer(uint64_t id) {
  answer_->n_pages = 0;
  tell(untold_.take_withdrawn(load_word_of(request_->withdrawn)));
  // It may have been given up long ago, and another one written in its place.
  if (is_withdrawn(id)) {
    ++counts_.n_withdrawn;
    return true;
  }
  Request request{RequestKind::kPublish, 0, 0, Deadline::after(0), {}, {}, {}, {}};
  if (!take(id, &request)) return is_withdrawn(id);
  ++counts_.n_requests;
  if (engine_.turns->take(request.deadline, [&] { return is_withdrawn(id); })) {
    serve(id, request);
    engine_.turns->give_back();
  } else {
    give_up(request);
  }
  answer_->n_pages = static_cast<uint32_t>(request.n_pages);
  return true;
}

// As many others of its engine were served all the time as may be.
void HostLine::give_up(const Request& request) {
  std::fill_n(answer_->is_found, request.n_pages, uint8_t{0});
  std::fill_n(answer_->statuses, request.n_pages, static_cast<uint8_t>(PoolStatus::kTimedOut));
  if (request.kind == RequestKind::kMissed) tell(request.keys);
}

void HostLine::serve(uint64_t id, const Request& request) {
  answer_->is_draining = *is_draining_;
  switch (request.kind) {
    case RequestKind::kPublish:
      publish(id, request);
      break;
    case RequestKind::kLookUp:
      look_up(request);
      break;
    case RequestKind::kMissed:
      tell(request.keys);
      break;
    case RequestKind::kPublishAgain:
    case RequestKind::kConfirm:
      publish_again(id, request);
      break;
    case RequestKind::kFinds:
      if (engine_.finds != nullptr) engine_.finds->take(engine_.number, request.keys, request.finds);
      break;
  }
}

bool HostLine::take(uint64_t id, Request* request) const {
  request->kind = static_cast<RequestKind>(request_->kind);
  request->n_pages = request_->n_pages;
  request->n_pieces = request_->n_pieces;
  request->deadline = Deadline::after(static_cast<double>(request_->timeout_ns) / 1e9);
  const bool is_publish = request->kind == RequestKind::kPublish;
  if (request->kind < RequestKind::kPublish || request->kind > RequestKind::kFinds) return false;
  if (request->n_pages == 0 || request->n_pages > kMaxPages) return false;
  if (is_publish && (request->n_pieces == 0 || request->n_pieces > kMaxPieces / request->n_pages))
    return false;
  request->keys.assign(request_->keys, request_->keys + request->n_pages);
  if (is_publish && !take_pieces(request)) return false;
  if (request->kind == RequestKind::kFinds)
    request->finds.assign(request_->finds, request_->finds + request->n_pages);
  return load_word_of(request_->id) == id && !find_duplicate(request->keys.data(), request->n_pages);
}

// Turns places in the engine's memory into addresses in this process.
bool HostLine::take_pieces(Request* request) const {
  const size_t n = request->n_pages * request->n_pieces;
  const std::vector<MemoryPiece> given(request_->pieces, request_->pieces + n);
  uint32_t number = 0;
  MappedMemory* memory = nullptr;
  request->pieces.reserve(n);
  for (const MemoryPiece& piece : given) {
    if (memory == nullptr || piece.memory != number) {
      auto found = engine_.memories->find(piece.memory);
      if (!found) return false;
      number = piece.memory;
      memory = found.get();
      request->memories.push_back(std::move(found));
    }
    if (piece.nbytes == 0 || piece.offset > memory->nbytes() ||
        piece.nbytes > memory->nbytes() - piece.offset) {
      return false;
    }
    request->pieces.push_back(
        {static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory->base() + piece.offset)),
         static_cast<int64_t>(piece.nbytes)});
  }
  return true;
}

void HostLine::publish(uint64_t id, const Request& request) {
  const size_t n = request.n_pages;
  std::fill_n(answer_->is_found, n, uint8_t{0});
  std::fill_n(answer_->is_told, n, uint8_t{0});
  if (answer_->is_draining != 0) {
    std::fill_n(answer_->statuses, n, static_cast<uint8_t>(PoolStatus::kNotTried));
    return;
  }
  std::vector<PoolStatus> statuses(n);
  std::vector<Location> locations(n);
  // What is published here is this node's own: it must not go when a page of another's does.
  parts_.guests.take_out(request.keys.data(), n);
  Consented consent(*this, id);
  const PageBatch batch{n, request.n_pieces, request.keys.data(), request.pieces.data()};
  const Deadline& deadline = request.deadline;
  parts_.pool.publish(batch, statuses.data(), locations.data(), deadline, &consent, engine_.share);
  if (is_withdrawn(id)) ++counts_.n_withdrawn;
  const bool has_lost = parts_.guests.take_out(request.keys.data(), n) > 0;
  answer_->sequence = parts_.sequences.next();
  std::vector<uint8_t> is_there(n, 1);
  // A guest that came between the two was taken for what is published here, and has gone with the other.
  if (has_lost) parts_.pool.lookup(request.keys.data(), n, is_there.data(), locations.data());
  std::vector<Key> untold;
  for (size_t i = 0; i < n; ++i) {
    const bool is_stored = statuses[i] == PoolStatus::kStored;
    answer_->statuses[i] = static_cast<uint8_t>(statuses[i]);
    answer_->is_found[i] = is_there[i] != 0 && (is_stored || statuses[i] == PoolStatus::kExists) ? 1 : 0;
    answer_->locations[i] = locations[i];
    if (!is_stored) continue;
    ++counts_.n_stored_pages;
    counts_.n_stored_bytes += locations[i].length;
    untold.push_back(request.keys[i]);
  }
  if (announce(request)) note_published(request.keys);
  if (!untold.empty()) untold_.add(id, std::move(untold), deadline);
}

// As `publish` answers of pages that are there. The others are not tried.
void HostLine::publish_again(uint64_t id, const Request& request) {
  const size_t n = request.n_pages;
  std::fill_n(answer_->is_found, n, uint8_t{0});
  std::fill_n(answer_->is_told, n, uint8_t{0});
  std::fill_n(answer_->statuses, n, static_cast<uint8_t>(PoolStatus::kNotTried));
  if (answer_->is_draining != 0) return;
  // As in `publish`. What is a guest when it is looked up may go as one: it is looked for again.
  do {
    look_up(request);
  } while (parts_.guests.take_out(request.keys.data(), n) > 0);
  answer_->sequence = parts_.sequences.next();
  std::vector<Key> untold;
  for (size_t i = 0; i < n; ++i) {
    if (answer_->is_found[i] == 0) continue;
    answer_->statuses[i] = static_cast<uint8_t>(PoolStatus::kExists);
    untold.push_back(request.keys[i]);
  }
  announce(request);
  if (request.kind == RequestKind::kPublishAgain) note_published(untold);
  if (!untold.empty()) untold_.add(id, std::move(untold), request.deadline);
}

// Tells the node's own shard; the engine tells the other owners of the entries. False if no page is there.
bool HostLine::announce(const Request& request) {
  std::vector<wire::PutEntry> entries;
  std::vector<size_t> pages;
  for (size_t i = 0; i < request.n_pages; ++i) {
    if (answer_->is_found[i] == 0) continue;
    entries.push_back({request.keys[i], answer_->sequence, answer_->locations[i]});
    pages.push_back(i);
  }
  if (entries.empty()) return false;
  std::vector<uint8_t> is_own(entries.size());
  parts_.shard.put_own(entries.data(), entries.size(), parts_.shard.now(), is_own.data());
  for (size_t k = 0; k < pages.size(); ++k) answer_->is_told[pages[k]] = is_own[k];
  return true;
}

// Tells the node's disk, which counts it as a use of each page.
void HostLine::note_published(const std::vector<Key>& keys) {
  if (parts_.tier != nullptr) parts_.tier->note_published(keys.data(), keys.size());
}

// The engine won't. The node's announcer asks every owner of these whether it knows, and tells it if not.
void HostLine::tell(const std::vector<Key>& untold) {
  parts_.shard.doubt(untold.data(), untold.size());
}

void HostLine::look_up(const Request& request) {
  const size_t n = request.n_pages;
  parts_.pool.lookup(request.keys.data(), n, answer_->is_found, answer_->locations);
  parts_.pool.touch(request.keys.data(), n);
}

}  // namespace p2pkv::attaching
