// Pulling: which rows go where, reading them, and reporting what became of them.
#include <algorithm>

#include "offers/inbox_parts.h"
#include "page/words.h"

namespace p2pkv::offers {
namespace {

// Of one turn of a backlog; then others of the same peer get theirs.
constexpr uint64_t kBatchBytes = 32 << 20;
// Bytes that go from device to device count so much less: within a host they come at least so much faster.
constexpr uint64_t kFasterDirectly = 8;
constexpr size_t kBatchOffers = 512;
// Below what a message may have.
constexpr size_t kReportBytes = 512 << 10;

RowStatus to_row_status(const PullRow& row) {
  if (row.has_failed_copy) return RowStatus::kDeviceFailed;
  // Their numbers are the same; a region that is gone rejects.
  return static_cast<RowStatus>(row.status);
}

}  // namespace

void Inbox::pull(const std::shared_ptr<Backlog>& backlog) {
  Batch batch;
  std::string reports;
  uint32_t n_reports = 0;
  bool has_rows;
  {
    const std::lock_guard lock(mutex_);
    backlog->is_queued = false;
    batch.request = backlog->request.lock();
    if (is_closed_ || !batch.request || backlog->waiting.empty()) return;
    batch.link = backlog->waiting.front()->link;
    has_rows = fill(batch, *backlog);
    backlog->is_running = has_rows;
    if (!has_rows) conclude(batch, *backlog, &reports, &n_reports);
  }
  const std::shared_ptr<Link>& link = batch.link;
  if (has_rows) {
    if (batch.is_for_devices) {
      landing_of_devices()->read(backlog->puller->reader(), batch.rows, batch.grant->point.get(),
                                 batch.deadline, *batch.job);
    } else {
      backlog->puller->reader().read(batch.rows, batch.deadline, *batch.job);
    }
    load_fence();  // the report says that the last byte is here
    const std::lock_guard lock(mutex_);
    conclude(batch, *backlog, &reports, &n_reports);
  }
  bool is_told = n_reports == 0 || link->post(Kind::kPulled, 0, n_reports, reports);
  if (batch.n_to_stage > 0) is_told &= link->post(Kind::kStage, 0, batch.n_to_stage, batch.to_stage);
  // Told of the loss of the link were those that were proven already.
  if (!is_told || link->is_lost()) lost(*link);
  const std::lock_guard lock(mutex_);
  backlog->is_running = false;
  // Only what had its turn makes room for more; the rest waits for a grant.
  if (!is_closed_ && (has_rows || n_reports > 0 || batch.n_to_stage > 0)) queue(backlog);
}

// Takes the offers that can be placed, in their order. False if there is nothing to read.
bool Inbox::fill(Batch& batch, Backlog& backlog) {
  batch.grant = batch.request->grant;
  if (batch.request->ask != 0 && !batch.grant) return false;  // nobody waits for it any more
  bool is_first = true;
  size_t n_report_bytes = 0;
  while (!backlog.waiting.empty() && batch.nbytes < kBatchBytes && batch.offers.size() < kBatchOffers &&
         n_report_bytes < kReportBytes) {
    const auto incoming = backlog.waiting.front();
    if (incoming->lease.passed()) {
      end(*incoming);
      continue;
    }
    if (!place(batch, incoming)) break;
    if (!backlog.waiting.empty() && backlog.waiting.front() == incoming) backlog.waiting.pop_front();
    n_report_bytes += sizeof(PulledRecord) + incoming->rows.size();
    // The report of the whole batch comes before the first of its leases ends.
    if (is_first || incoming->lease.at() < batch.deadline.at()) batch.deadline = incoming->lease;
    is_first = false;
  }
  if (batch.rows.empty()) return false;
  if (batch.grant) {
    if (batch.grant->deadline.at() < batch.deadline.at()) batch.deadline = batch.grant->deadline;
    begin_writing(*batch.grant);
    batch.grant->jobs.emplace_back(batch.job, backlog.puller);
  }
  jobs_.emplace(batch.job, backlog.puller);
  return true;
}

// Finds memory for an offer's rows. False if there is none now.
bool Inbox::place(Batch& batch, const std::shared_ptr<Incoming>& incoming) {
  const size_t number = batch.offers.size();
  if (batch.grant && !batch.grant->request) return false;  // closed by the offer before this one
  if (!can_take(batch, *incoming)) {
    have_staged(batch, incoming);
    return true;
  }
  if (batch.grant) {
    std::vector<std::pair<size_t, size_t>> places;
    match(*incoming, *batch.grant, &places);
    for (const auto& [row, place] : places) {
      const PlacedRows::Row& to = batch.grant->placed.rows[place];
      batch.rows.push_back(
          {batch.grant->placed.memories[to.memory], to.offset, incoming->rows[row], Status::kPending});
      batch.places.emplace_back(number, row);
      batch.nbytes += incoming->lies_on_device() ? to.length / kFasterDirectly : to.length;
      if (batch.grant->placed.device_of(to)) batch.is_for_devices = true;
    }
    if (places.empty()) {
      batch.at_once.push_back(incoming);
      return true;
    }
    incoming->into = batch.grant;
  } else {
    incoming->block = buffers_.allocate(incoming->padded_nbytes, &incoming->is_in_pool);
    if (!incoming->block) {
      n_parked_offers_ += incoming->is_parked ? 0 : 1;
      incoming->is_parked = true;
      return false;
    }
    uint64_t at = incoming->block->offset();
    for (size_t row = 0; row < incoming->rows.size(); ++row) {
      batch.rows.push_back({incoming->block->memory(), at, incoming->rows[row], Status::kPending});
      batch.places.emplace_back(number, row);
      at += Incoming::padded(incoming->rows[row].length);
    }
    batch.nbytes += incoming->padded_nbytes;
  }
  incoming->state = Incoming::State::kPulling;
  batch.offers.push_back(incoming);
  return true;
}

// What lies on a device is read into devices' memory alone, over ways that know it: not before there is a
// grant.
bool Inbox::can_take(const Batch& batch, const Incoming& incoming) {
  if (!incoming.lies_on_device()) return true;
  if (!batch.grant) return false;
  const Granted& grant = *batch.grant;
  for (uint64_t row = incoming.first_row; row < incoming.end_row(); ++row) {
    if (row < grant.first_row || row - grant.first_row >= grant.placed.rows.size()) continue;
    const PlacedRows::Row& to = grant.placed.rows[row - grant.first_row];
    if (!grant.placed.memories[to.memory]->takes_directly()) return false;
  }
  return true;
}

// Forgets an offer, until it is told again, from its producer's staging: to all who ask for it.
void Inbox::have_staged(Batch& batch, const std::shared_ptr<Incoming>& incoming) {
  incoming->next_asks.clear();
  wire::append(batch.to_stage, incoming->offer);
  ++batch.n_to_stage;
  end(*incoming);
}

// Says which rows of an offer go to which of a grant, takes those, and sets the status of the others.
void Inbox::match(Incoming& incoming, Granted& grant, std::vector<std::pair<size_t, size_t>>* places) {
  const bool is_stored = incoming.state == Incoming::State::kStored;
  for (size_t i = 0; i < incoming.rows.size(); ++i) {
    if (is_stored && incoming.statuses[i] != RowStatus::kOk) continue;
    const uint64_t row = incoming.first_row + i;
    const bool is_granted = row >= grant.first_row && row - grant.first_row < grant.placed.rows.size();
    const size_t place = is_granted ? row - grant.first_row : 0;
    RowStatus& status = incoming.statuses[i];
    if (!is_granted) {
      if (!is_stored) status = RowStatus::kOutOfRange;
    } else if (grant.is_taken[place] != 0 || grant.statuses_now[place] == RowStatus::kOk) {
      if (!is_stored) status = RowStatus::kDuplicate;
    } else if (grant.placed.rows[place].length != incoming.rows[i].length) {
      if (!is_stored) status = RowStatus::kOutOfRange;
      settle_row(grant, place, RowStatus::kOutOfRange);
    } else {
      if (grant.statuses_now[place] != RowStatus::kPending) {
        grant.statuses_now[place] = RowStatus::kPending;
        ++grant.n_pending;
      }
      grant.is_taken[place] = 1;
      places->emplace_back(i, place);
    }
  }
}

// Takes what became of a batch's rows, and reports what the producer is to know.
void Inbox::conclude(Batch& batch, Backlog& backlog, std::string* reports, uint32_t* n_reports) {
  jobs_.erase({batch.job, backlog.puller});
  std::set<std::shared_ptr<Incoming>> unreachable;
  for (size_t i = 0; i < batch.rows.size(); ++i) {
    const auto [number, row] = batch.places[i];
    batch.offers[number]->statuses[row] =
        batch.rows[i].is_unreachable ? RowStatus::kPeerLost : to_row_status(batch.rows[i]);
    if (batch.rows[i].is_unreachable) unreachable.insert(batch.offers[number]);
  }
  if (batch.grant && !batch.rows.empty()) {
    end_writing(*batch.grant);
    std::erase_if(batch.grant->jobs, [&batch](const auto& job) { return job.first == batch.job; });
  }
  for (const auto& incoming : batch.at_once) conclude_one(batch, incoming, reports, n_reports);
  for (const auto& incoming : batch.offers) {
    const bool is_revoked = batch.grant && !batch.grant->request;
    if (unreachable.contains(incoming) && !is_revoked && !batch.link->is_lost()) {
      let_go_of_rows(*incoming, *batch.grant);
      have_staged(batch, incoming);
    } else {
      conclude_one(batch, incoming, reports, n_reports);
    }
  }
  if (batch.grant) batch.grant->changed.notify_all();
}

// Others may bring them now.
void Inbox::let_go_of_rows(Incoming& incoming, Granted& grant) {
  for (size_t i = 0; i < incoming.rows.size(); ++i) {
    const RowStatus status = incoming.statuses[i];
    if (status == RowStatus::kOutOfRange || status == RowStatus::kDuplicate) continue;
    grant.is_taken[incoming.first_row + i - grant.first_row] = 0;
  }
}

void Inbox::conclude_one(Batch& batch, const std::shared_ptr<Incoming>& incoming, std::string* reports,
                         uint32_t* n_reports) {
  const bool is_asked = batch.request->ask != 0;
  const bool is_revoked = batch.grant && !batch.grant->request;
  size_t n_here = 0;
  size_t n_failed = 0;
  RowStatus worst = RowStatus::kOk;
  for (RowStatus& status : incoming->statuses) {
    if (is_revoked && (status == RowStatus::kOk || status == RowStatus::kPending))
      status = RowStatus::kCanceled;
    if (status == RowStatus::kOk) ++n_here;
    if (status == RowStatus::kOk || status == RowStatus::kOutOfRange || status == RowStatus::kDuplicate)
      continue;
    ++n_failed;
    worst = status;
  }
  n_failed_rows_ += n_failed;
  // What is asked for stays with the producer until all of it is here: it may be asked for again.
  const bool is_left = is_asked && (n_failed > 0 || n_here == 0);
  if (!is_left) {
    wire::append(*reports, PulledRecord{incoming->offer, static_cast<uint32_t>(incoming->rows.size()), 0});
    append_all(*reports, incoming->statuses);
    ++*n_reports;
  }
  const bool is_to_prove = !is_left && n_here > 0;
  if (incoming->into && !is_revoked) {
    for (size_t i = 0; i < incoming->rows.size(); ++i) {
      const RowStatus status = incoming->statuses[i];
      if (status == RowStatus::kOutOfRange || status == RowStatus::kDuplicate) continue;
      if (status == RowStatus::kOk && is_to_prove) continue;
      settle_row(*incoming->into, incoming->first_row + i - incoming->into->first_row,
                 status == RowStatus::kOk ? worst : status);
    }
  }
  if (is_to_prove) {
    incoming->state = Incoming::State::kProving;
  } else {
    end(*incoming);
  }
}

}  // namespace p2pkv::offers
