#include "offers/peer_reader.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace p2pkv::offers {
namespace {

// Until a transport that did not reach the peer is tried again with it.
constexpr std::chrono::seconds kRetryWay{30};
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

bool PullJob::use(std::shared_ptr<Endpoint> endpoint) {
  const std::lock_guard lock(mutex_);
  if (is_broken_ && endpoint) return false;
  endpoint_ = std::move(endpoint);
  return true;
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
  Status failure = Status::kPeerLost;
  const auto known = describe(rows[0]->remote.source, deadline, job);
  // Each attempt uses up a way or a connection that has gone stale.
  for (size_t attempt = 0; known && attempt < ways_.size() + 2 && !rows.empty(); ++attempt) {
    if (job.is_broken() || deadline.passed()) break;
    std::string region;
    auto connection = borrow(*known, deadline, job, &region);
    if (!connection) break;
    const Status worst = read_over(*connection, region, rows, deadline, job);
    give_back(std::move(connection), worst);
    std::erase_if(rows, [](const PullRow* row) { return row->status != Status::kPending; });
    if (worst != Status::kPeerLost) break;
  }
  if (job.is_broken()) {
    failure = Status::kCanceled;
  } else if (deadline.passed()) {
    failure = Status::kTimedOut;
  }
  for (PullRow* row : rows) row->status = failure;
}

Status PeerReader::read_over(Connection& connection, const std::string& region, std::vector<PullRow*>& rows,
                             const Deadline& deadline, PullJob& job) {
  if (!job.use(connection.endpoint)) return Status::kCanceled;
  if (connection.regions.size() >= kMaxSources) connection.regions.clear();
  auto& remote = connection.regions[rows[0]->remote.source];
  std::string error;
  if (!remote) remote = connection.endpoint->attach(region, &error);
  const auto& local = rows[0]->local->regions[connection.way];
  Status worst = Status::kOk;
  std::shared_ptr<Transfer> transfer;
  if (remote && local) {
    std::vector<Span> spans;
    spans.reserve(rows.size());
    for (const PullRow* row : rows) {
      spans.push_back({static_cast<int64_t>(row->local_offset), static_cast<int64_t>(row->remote.offset),
                       static_cast<int64_t>(row->remote.length)});
    }
    const auto left = std::chrono::duration<double>(deadline.at() - Clock::now()).count();
    transfer = connection.endpoint->read(local, remote, std::move(spans), {});
    transfer->wait(left);
    const auto& statuses = transfer->statuses();
    for (size_t i = 0; i < rows.size(); ++i) {
      // What was lost with a connection may come over another one. So may what was canceled, unless it was
      // this job: another one that had the connection before was broken off.
      const bool is_lost =
          statuses[i] == Status::kPeerLost || (statuses[i] == Status::kCanceled && !job.is_broken());
      if (!is_lost) rows[i]->status = statuses[i];
      const Status here = is_lost ? Status::kPeerLost : statuses[i];
      worst = std::max(worst, ends_endpoint(here) ? here : Status::kOk);
    }
  } else {
    worst = Status::kPeerLost;
  }
  job.use(nullptr);
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

std::unique_ptr<PeerReader::Connection> PeerReader::borrow(const std::vector<WayMessage>& known,
                                                           const Deadline& deadline, const PullJob& job,
                                                           std::string* region) {
  for (size_t way = 0; way < ways_.size(); ++way) {
    const auto described = std::find_if(known.begin(), known.end(), [&](const WayMessage& candidate) {
      return candidate.name == ways_[way].name && candidate.domain == ways_[way].transport->domain();
    });
    if (described == known.end()) continue;
    *region = described->region;
    {
      const std::lock_guard lock(mutex_);
      WayState& state = states_[way];
      if (is_closed_ || Clock::now() < state.unusable_until) continue;
      if (!state.idle.empty()) {
        auto connection = std::move(state.idle.back());
        state.idle.pop_back();
        return connection;
      }
    }
    if (auto connection = open(way, deadline, job)) return connection;
    if (job.is_broken() || deadline.passed() || link_->is_lost()) return nullptr;
    ++n_fallbacks_;
    const std::lock_guard lock(mutex_);
    states_[way].unusable_until = Clock::now() + kRetryWay;
  }
  return nullptr;
}

std::unique_ptr<PeerReader::Connection> PeerReader::open(size_t way, const Deadline& deadline,
                                                         const PullJob& job) {
  auto connection = std::make_unique<Connection>();
  connection->way = way;
  connection->endpoint = ways_[way].transport->open();
  const std::string half = connection->endpoint->describe();
  std::string question;
  append_text(question, ways_[way].name);
  question += half;
  const auto answer = half.empty() ? std::nullopt : ask(Kind::kJoin, question, deadline, job);
  std::string error;
  if (answer && connection->endpoint->bind(*answer, &error)) return connection;
  connection->endpoint->close();
  return nullptr;
}

void PeerReader::give_back(std::unique_ptr<Connection> connection, Status worst) {
  {
    const std::lock_guard lock(mutex_);
    WayState& state = states_[connection->way];
    if (worst == Status::kOk && !is_closed_) {
      connection->has_read = true;
      state.idle.push_back(std::move(connection));
      return;
    }
    if (worst == Status::kPeerLost) {
      if (!connection->has_read) {
        ++n_fallbacks_;
        state.unusable_until = Clock::now() + kRetryWay;
      }
      // Its fellows were connected to the same, and what was told of the memory may be out of date.
      known_.clear();
    }
  }
  connection->endpoint->close();
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
  std::vector<std::unique_ptr<Connection>> closing;
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    for (WayState& state : states_) {
      for (auto& connection : state.idle) closing.push_back(std::move(connection));
      state.idle.clear();
    }
    answered_.notify_all();
  }
  for (const auto& connection : closing) connection->endpoint->close();
}

}  // namespace p2pkv::offers
