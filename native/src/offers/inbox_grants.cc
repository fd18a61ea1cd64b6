// Grants: opening, settling and revoking them.
#include <algorithm>

#include "offers/inbox_parts.h"

namespace p2pkv::offers {
namespace {

// How long a call that names no time may copy.
constexpr double kLookS = 0.01;

}  // namespace

bool Inbox::Granted::done() {
  home_->take_stored(*this, Deadline::after(kLookS), false);
  const std::lock_guard lock(home_->mutex_);
  return is_over();
}

void Inbox::Granted::wait(const Deadline& until) {
  const bool is_bounded_by_caller = until.at() < deadline.at();
  const Deadline& first = is_bounded_by_caller ? until : deadline;
  do {
    home_->take_stored(*this, first, true);
    std::unique_lock lock(home_->mutex_);
    changed.wait_until(lock, first.at(), [this] { return is_over() || (has_news && !is_copying); });
    if (is_over()) return;
  } while (!first.passed());
  if (!is_bounded_by_caller) revoke(RowStatus::kTimedOut);
}

RowStatuses Inbox::Granted::statuses() {
  home_->take_stored(*this, Deadline::after(kLookS), false);
  const std::lock_guard lock(home_->mutex_);
  return statuses_now;
}

std::shared_ptr<Grant> Inbox::grant(Rows rows, PlacedRows placed, const Deadline& deadline,
                                    std::string* error) {
  std::shared_ptr<Granted> grant;
  {
    const std::lock_guard lock(mutex_);
    auto& request = requests_[rows.request];
    if (!request) request = std::make_shared<Request>();
    request->name = rows.request;
    if (request->grant) {
      *error = "request '" + rows.request + "' has an open grant; revoke it first";
      return nullptr;
    }
    grant = add_grant(std::shared_ptr(request), rows, std::move(placed), deadline);
  }
  take_stored(*grant, deadline, false);
  return grant;
}

std::shared_ptr<Grant> Inbox::get(const std::shared_ptr<Link>& from, Rows rows, PlacedRows placed,
                                  const Deadline& deadline) {
  const size_t n_rows = placed.rows.size();
  std::vector<PlacedRows> cut;
  for (size_t first = 0; n_rows > Transfers::kMaxRows && first < n_rows; first += Transfers::kMaxRows)
    cut.push_back(placed.part(first, std::min(Transfers::kMaxRows, n_rows - first)));
  // Held until all is asked for: nothing is pulled before, so whoever offers it knows of every ask when it
  // hears that something was taken.
  const std::lock_guard lock(mutex_);
  if (cut.empty()) return ask(from, rows, std::move(placed), deadline);
  Rows some{rows.request, rows.first_row, {}, rows.stream};
  std::vector<std::shared_ptr<Granted>> parts;
  for (PlacedRows& part : cut) {
    const auto n = static_cast<uint32_t>(part.rows.size());
    parts.push_back(ask(from, some, std::move(part), deadline));
    some.first_row += n;
  }
  return std::make_shared<Asked>(shared_from_this(), std::move(parts));
}

std::shared_ptr<Inbox::Granted> Inbox::ask(const std::shared_ptr<Link>& from, const Rows& rows,
                                           PlacedRows placed, const Deadline& deadline) {
  auto request = std::make_shared<Request>();
  request->name = rows.request;
  request->from = from;
  request->ask = ++last_ask_;
  asks_[request->ask] = request;
  const auto n_rows = static_cast<uint32_t>(placed.rows.size());
  auto grant = add_grant(request, rows, std::move(placed), deadline);
  std::string body;
  wire::append(body, AskRecord{request->ask, left_ms(deadline), rows.first_row, n_rows,
                               static_cast<uint32_t>(rows.request.size())});
  body += rows.request;
  if (!from || !from->post(Kind::kAsk, 0, 1, body)) close_grant(*grant, RowStatus::kPeerLost);
  return grant;
}

std::shared_ptr<Inbox::Granted> Inbox::add_grant(const std::shared_ptr<Request>& request, const Rows& rows,
                                                 PlacedRows placed, const Deadline& deadline) {
  auto grant = std::make_shared<Granted>(shared_from_this(), request, rows, std::move(placed), deadline);
  request->grant = grant;
  grants_.insert(grant);
  if (is_closed_ || grant->placed.lie_in_closed_memory()) {
    close_grant(*grant, RowStatus::kCanceled);
    return grant;
  }
  for (const auto& [link, backlog] : request->backlogs) queue(backlog);
  return grant;
}

void Inbox::settle_row(Granted& grant, size_t row, RowStatus status) {
  grant.is_taken[row] = 0;
  if (grant.statuses_now[row] != RowStatus::kPending) return;
  grant.statuses_now[row] = status;
  if (--grant.n_pending == 0) close_grant(grant, status);
}

// Rows that nobody brings. What an offer is bringing is that one's to fail.
void Inbox::settle_rows(Granted& grant, uint64_t first, uint64_t end, RowStatus status) {
  const uint64_t grant_end = uint64_t{grant.first_row} + grant.placed.rows.size();
  for (uint64_t row = std::max<uint64_t>(grant.first_row, first); row < std::min(grant_end, end); ++row) {
    const size_t at = row - grant.first_row;
    if (grant.is_taken[at] == 0) settle_row(grant, at, status);
  }
}

// From here on nothing new is pulled into it. What is being pulled goes on until its job ends.
void Inbox::close_grant(Granted& grant, RowStatus reason) {
  for (RowStatus& status : grant.statuses_now) {
    if (status == RowStatus::kPending) status = reason;
  }
  grant.n_pending = 0;
  grant.is_closed = true;
  grant.to_copy.clear();
  if (const auto request = std::exchange(grant.request, nullptr)) {
    const auto self = grant.shared_from_this();  // the next lines may be its last owners
    request->grant = nullptr;
    grants_.erase(self);
    if (request->ask != 0) {
      asks_.erase(request->ask);
      std::string body;
      wire::append(body, request->ask);
      if (request->from) request->from->post(Kind::kAskEnd, 0, 1, body);
      // What the producer offered stays with it. What is being proven is its answer's to end.
      // Ending the last of it clears the backlogs, so they can't be walked meanwhile.
      std::vector<std::shared_ptr<Incoming>> waiting;
      for (const auto& [link, backlog] : request->backlogs) {
        waiting.insert(waiting.end(), backlog->waiting.begin(), backlog->waiting.end());
      }
      for (const auto& incoming : waiting) end(*incoming);
    }
    drop_unused(request);
    grant.changed.notify_all();
  }
}

void Inbox::revoke(const std::vector<std::shared_ptr<Granted>>& grants, RowStatus reason) {
  Jobs jobs;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& grant : grants) {
      close_grant(*grant, reason);
      jobs.insert(jobs.end(), grant->jobs.begin(), grant->jobs.end());
    }
  }
  break_off(jobs);
  std::unique_lock lock(mutex_);
  for (const auto& grant : grants) {
    grant->changed.wait(lock, [&grant] { return grant->n_writing == 0; });
  }
}

void Inbox::break_off(const Jobs& jobs) {
  for (const auto& [job, puller] : jobs) {
    job->break_off();
    puller->reader().wake();
    if (const auto landing = landing_of_devices()) landing->area().wake();
  }
}

void Inbox::revoke_memory(uint32_t memory_id) {
  std::vector<std::shared_ptr<Granted>> grants;
  {
    const std::lock_guard lock(mutex_);
    // Closed ones as well: what is under way into them goes on until it is broken off.
    for (const auto* some : {&grants_, &writing_}) {
      for (const auto& grant : *some) {
        if (grant->placed.lie_in(memory_id)) grants.push_back(grant);
      }
    }
  }
  revoke(grants, RowStatus::kCanceled);
}

void Inbox::begin_writing(Granted& grant) {
  if (grant.n_writing++ == 0) writing_.insert(grant.shared_from_this());
}

void Inbox::end_writing(Granted& grant) {
  if (--grant.n_writing == 0) writing_.erase(grant.shared_from_this());
  grant.changed.notify_all();
}

}  // namespace p2pkv::offers
