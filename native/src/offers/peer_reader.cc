#include "offers/peer_reader.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace p2pkv::offers {
namespace {

// What is remembered of one peer's memories. A node has few; one that names more is asked again.
constexpr size_t kMaxSources = 64;

}  // namespace

void PullJob::break_off() {
  is_broken_ = true;
  // Held until the endpoint is closed, so that whoever reads keeps the transfer so long: the end of what it
  // does to the endpoint is seen through the transfer.
  const std::lock_guard lock(mutex_);
  if (endpoint_) endpoint_->close();
}

bool PullJob::use(std::shared_ptr<BoundEndpoint> endpoint) {
  const std::lock_guard lock(mutex_);
  if (is_broken_ && endpoint) return false;
  endpoint_ = std::move(endpoint);
  return true;
}

PeerReader::PeerReader(std::shared_ptr<Link> link, const Transfers::Options& options,
                       std::atomic<uint64_t>& n_fallbacks)
    : link_(std::move(link)), ways_(options.ways), peers_(options.peers), n_fallbacks_(n_fallbacks) {
  peers_->add_link(link_->peer(), link_->id());
}

void PeerReader::read(std::vector<PullRow>& rows, const Deadline& deadline, PullJob& job) {
  std::vector<PullRow*> left;
  for (PullRow& row : rows) left.push_back(&row);
  std::stable_sort(left.begin(), left.end(), [](const PullRow* a, const PullRow* b) {
    return std::pair(a->remote.source, a->local.get()) < std::pair(b->remote.source, b->local.get());
  });
  for (size_t start = 0; start < left.size();) {
    size_t end = start + 1;
    while (end < left.size() && left[end]->remote.source == left[start]->remote.source &&
           left[end]->local == left[start]->local)
      ++end;
    std::vector<PullRow*> group(left.begin() + static_cast<ptrdiff_t>(start),
                                left.begin() + static_cast<ptrdiff_t>(end));
    read_group(group, deadline, job);
    start = end;
  }
}

void PeerReader::read_group(std::vector<PullRow*>& rows, const Deadline& deadline, PullJob& job) {
  const uint32_t source = rows[0]->remote.source;
  const auto known = describe(source, deadline, job);
  PeerConnections::Route route{link_->id(), {}, [&](size_t way) { return open(way, deadline, job); }};
  for (size_t i = 0; known && i < ways_.size(); ++i) {
    if (rows[0]->local->regions[i] && find(*known, ways_[i])) route.ways.push_back(ways_[i].number);
  }
  // Each attempt uses up a way or a connection that has gone stale.
  for (size_t attempt = 0; attempt < ways_.size() + 2 && !rows.empty(); ++attempt) {
    if (job.is_broken() || deadline.passed()) break;
    const auto connection = peers_->borrow_over(link_->peer(), route);
    if (!connection) break;
    const auto remote = attach(*connection, source, *known);
    if (!remote) {
      // The way leads to the peer, and not to this memory: it is not to blame.
      peers_->discard(connection);
      std::erase(route.ways, connection->way);
      ++n_fallbacks_;
      forget_descriptions();
      continue;
    }
    const Status worst = read_over(connection, remote, rows, deadline, job);
    std::erase_if(rows, [](const PullRow* row) { return row->status != Status::kPending; });
    if (worst != Status::kPeerLost) break;
    forget_descriptions();
  }
  Status failure = Status::kPeerLost;
  if (job.is_broken() || peers_->is_closed()) {
    failure = Status::kCanceled;
  } else if (deadline.passed()) {
    failure = Status::kTimedOut;
  }
  for (PullRow* row : rows) row->status = failure;
}

Status PeerReader::read_over(const ConnectionPtr& connection, const std::shared_ptr<RemoteRegion>& remote,
                             std::vector<PullRow*>& rows, const Deadline& deadline, PullJob& job) {
  if (!job.use(connection->endpoint)) {
    peers_->discard(connection);
    return Status::kCanceled;
  }
  std::vector<Span> spans;
  spans.reserve(rows.size());
  for (const PullRow* row : rows) {
    spans.push_back({static_cast<int64_t>(row->local_offset), static_cast<int64_t>(row->remote.offset),
                     static_cast<int64_t>(row->remote.length)});
  }
  const auto began = Clock::now();
  const auto& local = rows[0]->local->regions[place_of(connection->way)];
  const auto transfer = connection->endpoint->read(local, remote, std::move(spans), {});
  transfer->wait(std::chrono::duration<double>(deadline.at() - began).count());
  const auto& statuses = transfer->statuses();
  Status worst = Status::kOk;
  bool is_out_of_reach = false;
  ReadAmount amount{0, 0, std::chrono::duration<double>(Clock::now() - began).count()};
  for (size_t i = 0; i < rows.size(); ++i) {
    // What was lost with a connection may come over another one. So may what was canceled, unless it was this
    // job: then all is closing, and there is no other.
    const bool is_lost =
        statuses[i] == Status::kPeerLost || (statuses[i] == Status::kCanceled && !job.is_broken());
    if (!is_lost) rows[i]->status = statuses[i];
    if (statuses[i] == Status::kOk) amount.nbytes += rows[i]->remote.length;
    is_out_of_reach |= statuses[i] == Status::kOutOfRange && (rows[i]->remote.flags & kOnDevice) != 0;
    const Status here = is_lost ? Status::kPeerLost : statuses[i];
    worst = std::max(worst, ends_endpoint(here) ? here : Status::kOk);
  }
  job.use(nullptr);
  if (is_out_of_reach) peers_->tell_out_of_reach(link_->peer(), connection->way, link_->id());
  // Whoever broke the job off may have closed the endpoint after the last byte: nobody is lent that.
  if (job.is_broken()) {
    peers_->discard(connection);
  } else {
    peers_->release(connection, worst, amount);
  }
  return worst;
}

std::optional<std::vector<WayMessage>> PeerReader::describe(uint32_t source, const Deadline& deadline,
                                                            const PullJob& job) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(source);
    if (found != known_.end()) return found->second;
  }
  std::string question;
  wire::append(question, source);
  const auto answer = ask(Kind::kReach, question, deadline, job);
  if (!answer) return std::nullopt;
  const auto known = take_ways(wire::Reader(*answer));
  if (!known) return std::nullopt;
  const std::lock_guard lock(mutex_);
  if (known_.size() >= kMaxSources) known_.clear();
  if (!known->empty()) known_[source] = *known;
  return known;
}

void PeerReader::forget_descriptions() {
  // What was told of the memory may be out of date.
  const std::lock_guard lock(mutex_);
  known_.clear();
}

const WayMessage* PeerReader::find(const std::vector<WayMessage>& known, const Transfers::Way& way) const {
  const auto described = std::find_if(known.begin(), known.end(), [&](const WayMessage& candidate) {
    return candidate.name == way.name && candidate.domain == way.transport->domain();
  });
  return described == known.end() ? nullptr : &*described;
}

size_t PeerReader::place_of(size_t number) const {
  const auto way = std::find_if(ways_.begin(), ways_.end(),
                                [number](const Transfers::Way& each) { return each.number == number; });
  return static_cast<size_t>(way - ways_.begin());
}

std::shared_ptr<RemoteRegion> PeerReader::attach(Connection& connection, uint32_t source,
                                                 const std::vector<WayMessage>& known) const {
  if (connection.regions.size() >= kMaxSources) connection.regions.clear();
  auto& region = connection.regions[{link_->id(), source}];
  if (region) return region;
  // Whoever opened it, a connection over one of `ways_` has an endpoint of the native core.
  const auto endpoint = std::dynamic_pointer_cast<Endpoint>(connection.endpoint);
  const WayMessage* told = find(known, ways_[place_of(connection.way)]);
  std::string error;
  if (endpoint && told != nullptr) region = endpoint->attach(told->region, &error);
  return region;
}

// None: nobody is to blame, for the pull has come to its end.
std::optional<Opened> PeerReader::open(size_t number, const Deadline& deadline, const PullJob& job) {
  const Transfers::Way& way = ways_[place_of(number)];
  const auto endpoint = way.transport->open();
  const std::string half = endpoint->describe();
  std::string question;
  append_text(question, way.name);
  question += half;
  const auto answer = half.empty() ? std::nullopt : ask(Kind::kJoin, question, deadline, job);
  std::string error;
  if (answer && endpoint->bind(*answer, &error)) return Opened{endpoint, nullptr};
  endpoint->close();
  if (job.is_broken() || deadline.passed() || link_->is_lost()) return std::nullopt;
  return Opened{};
}

std::optional<std::string> PeerReader::ask(Kind kind, std::string_view body, const Deadline& deadline,
                                           const PullJob& job) {
  uint64_t id;
  {
    const std::lock_guard lock(mutex_);
    id = ++last_id_;
    answers_[id] = std::nullopt;
  }
  const bool is_posted = link_->post(kind, id, 1, body);
  std::unique_lock lock(mutex_);
  const auto is_over = [&] {
    return answers_[id].has_value() || is_closed_ || job.is_broken() || link_->is_lost();
  };
  if (is_posted) answered_.wait_until(lock, deadline.at(), is_over);
  auto answer = std::move(answers_[id]);
  answers_.erase(id);
  return answer && !answer->empty() ? answer : std::nullopt;
}

void PeerReader::replied(const wire::Header& header, wire::Reader body) {
  const std::lock_guard lock(mutex_);
  const auto waiting = answers_.find(header.request_id);
  if (waiting == answers_.end()) return;  // too late
  const bool is_ok = header.status == static_cast<uint32_t>(wire::ReplyStatus::kOk);
  waiting->second = is_ok ? std::string(body.rest()) : std::string();
  answered_.notify_all();
}

void PeerReader::wake() {
  const std::lock_guard lock(mutex_);
  answered_.notify_all();
}

void PeerReader::close() {
  peers_->drop_link(link_->peer(), link_->id());
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  answered_.notify_all();
}

}  // namespace p2pkv::offers
