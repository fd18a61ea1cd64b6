#include "offers/inbox.h"

#include <algorithm>

#include "offers/inbox_parts.h"

namespace p2pkv::offers {

bool Inbox::start_landing(std::shared_ptr<Landing> landing, const std::shared_ptr<cuda::Device>& device,
                          std::string* error) {
  if (!buffers_.lock_for(device, error)) return false;
  const std::lock_guard lock(landing_mutex_);
  landing_ = std::move(landing);
  return true;
}

std::shared_ptr<Landing> Inbox::landing_of_devices() {
  const std::lock_guard lock(landing_mutex_);
  return landing_;
}

bool Inbox::offered(const std::shared_ptr<Link>& link, uint32_t count, wire::Reader body) {
  std::string reports;
  uint32_t n_reports = 0;
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) return true;
    for (uint32_t i = 0; i < count; ++i) {
      auto message = offers::take_offer(body);
      if (!message) return false;
      const OfferRecord record = message->record;
      const RowStatus taken = take_message(link, std::move(*message));
      if (taken == RowStatus::kPending) continue;
      wire::append(reports, PulledRecord{record.offer, record.n_rows, 0});
      reports.append(record.n_rows, static_cast<char>(taken));
      ++n_reports;
    }
  }
  if (n_reports > 0) link->post(Kind::kPulled, 0, n_reports, reports);
  return true;
}

// kPending if it waits now, or can be forgotten; else what the producer is to be told of its rows at once.
RowStatus Inbox::take_message(const std::shared_ptr<Link>& link, OfferMessage message) {
  auto share = shares_->take(link->id(), Incoming::cost(message));
  if (!share) {
    ++n_refused_offers_;
    // What is asked for stays with the producer; the asker gives up at its own deadline.
    return message.record.ask == 0 ? RowStatus::kCanceled : RowStatus::kPending;
  }
  const OfferRecord record = message.record;
  const std::string name = message.name;
  const auto incoming = std::make_shared<Incoming>(link, std::move(message), std::move(share));
  if (take_offer(incoming, record.ask, name)) return RowStatus::kPending;
  n_duplicate_rows_ += record.n_rows;
  return RowStatus::kDuplicate;
}

// False if some of its rows have come already.
bool Inbox::take_offer(const std::shared_ptr<Incoming>& incoming, uint64_t ask, const std::string& name) {
  const OfferKey key{incoming->link->id(), incoming->offer};
  const auto known = incoming_.find(key);
  if (known != incoming_.end()) {
    const auto before = known->second;
    if (ask != 0 && before->ask != 0 && before->ask != ask) {
      auto& next = before->next_asks;
      if (asks_.contains(ask) && std::find(next.begin(), next.end(), ask) == next.end()) next.push_back(ask);
      return true;
    }
    // It was put, waits here, and is now an answer as well; or the same asker is told where else it lies.
    if (before->state != Incoming::State::kWaiting) return true;
    incoming->next_asks = std::exchange(before->next_asks, {});
    end(*before);
  }
  std::shared_ptr<Request> request;
  if (ask != 0) {
    const auto asked = asks_.find(ask);
    if (asked == asks_.end()) return true;  // nobody waits any more; the producer keeps it
    request = asked->second;
  } else {
    auto& put = requests_[name];
    if (!put) put = std::make_shared<Request>();
    request = put;
    request->name = name;
  }
  const auto after = request->live.lower_bound(incoming->first_row);
  const bool overlaps =
      (after != request->live.end() && after->first < incoming->end_row()) ||
      (after != request->live.begin() && std::prev(after)->second->end_row() > incoming->first_row);
  if (overlaps) return ask != 0;
  incoming->request = request;
  incoming_[key] = incoming;
  request->live[incoming->first_row] = incoming;
  auto& backlog = request->backlogs[incoming->link->id()];
  if (!backlog) {
    auto& puller = pullers_[incoming->link->id()];
    if (!puller) puller = std::make_shared<Puller>(incoming->link, options_, n_fallbacks_);
    backlog = std::make_shared<Backlog>();
    backlog->request = request;
    backlog->puller = puller;
  }
  backlog->waiting.push_back(incoming);
  queue(backlog);
  return true;
}

void Inbox::queue(const std::shared_ptr<Backlog>& backlog) {
  if (backlog->is_queued || backlog->is_running || backlog->waiting.empty()) return;
  backlog->is_queued = true;
  backlog->puller->queue([this, backlog] { pull(backlog); });
}

// Forgets an offer. Nothing may write to its block any more.
void Inbox::end(Incoming& incoming) {
  incoming.state = Incoming::State::kEnded;
  incoming.block.reset();
  incoming.into.reset();
  const auto request = incoming.request.lock();
  const OfferKey key{incoming.link->id(), incoming.offer};
  if (request) {
    const auto live = request->live.find(incoming.first_row);
    if (live != request->live.end() && live->second.get() == &incoming) request->live.erase(live);
    std::erase_if(request->stored, [&](const auto& stored) { return stored.get() == &incoming; });
    const auto backlog = request->backlogs.find(incoming.link->id());
    if (backlog != request->backlogs.end()) {
      std::erase_if(backlog->second->waiting,
                    [&](const auto& waiting) { return waiting.get() == &incoming; });
    }
  }
  const auto known = incoming_.find(key);
  if (known != incoming_.end() && known->second.get() == &incoming) incoming_.erase(known);
  if (request) drop_unused(request);
  pass_on(incoming);
}

// Gives what its asker leaves with the producer to who asked next and still waits.
void Inbox::pass_on(Incoming& incoming) {
  std::vector<uint64_t> asks = std::exchange(incoming.next_asks, {});
  std::erase_if(asks, [this](uint64_t ask) { return !asks_.contains(ask); });
  if (asks.empty() || is_closed_) return;
  const uint64_t ask = asks.front();
  const auto next = std::make_shared<Incoming>(incoming, ask);
  next->next_asks.assign(asks.begin() + 1, asks.end());
  take_offer(next, ask, {});
}

// Nobody else will have what is over for its asker.
void Inbox::end_for_next(Incoming& incoming, RowStatus status) {
  for (const uint64_t ask : std::exchange(incoming.next_asks, {})) {
    const auto asked = asks_.find(ask);
    if (asked == asks_.end() || !asked->second->grant) continue;
    const auto grant = asked->second->grant;  // closes with its last row
    settle_rows(*grant, incoming.first_row, incoming.end_row(), status);
  }
}

void Inbox::drop_unused(const std::shared_ptr<Request>& request) {
  if (request->grant || !request->live.empty()) return;
  request->backlogs.clear();
  const auto put = requests_.find(request->name);
  if (put != requests_.end() && put->second == request) requests_.erase(put);
  asks_.erase(request->ask);
}

// Settles the rows that an offer was to bring into the open grant of its request.
void Inbox::fail_rows(Incoming& incoming, RowStatus status) {
  const auto request = incoming.request.lock();
  if (!request || !request->grant) return;
  const auto grant = request->grant;  // closes with its last row
  for (size_t i = 0; i < incoming.rows.size(); ++i) {
    const uint64_t row = incoming.first_row + i;
    if (row < grant->first_row || row - grant->first_row >= grant->placed.rows.size()) continue;
    const size_t at = row - grant->first_row;
    // What another offer is bringing is not this one's to fail.
    const bool is_its_own = incoming.into == grant && incoming.statuses[i] == RowStatus::kOk;
    if (!is_its_own && grant->is_taken[at] != 0) continue;
    settle_row(*grant, at, status);
  }
}

bool Inbox::settled(const Link& link, uint32_t count, wire::Reader body) {
  const std::lock_guard lock(mutex_);
  for (uint32_t i = 0; i < count; ++i) {
    const auto record = body.value<SettledRecord>();
    if (!record) return false;
    const auto found = incoming_.find({link.id(), record->offer});
    if (found == incoming_.end() || found->second->state != Incoming::State::kProving) continue;
    prove(std::shared_ptr(found->second), record->is_valid != 0 || !options_.is_validating);
  }
  return true;
}

// The producer's word about an offer whose bytes are here.
void Inbox::prove(const std::shared_ptr<Incoming>& incoming, bool is_valid) {
  uint64_t n_rows = 0;
  uint64_t nbytes = 0;
  for (size_t i = 0; i < incoming->rows.size(); ++i) {
    if (incoming->statuses[i] != RowStatus::kOk) continue;
    ++n_rows;
    nbytes += incoming->rows[i].length;
  }
  if (!is_valid) n_rejected_rows_ += n_rows;
  if (is_valid) n_pulled_bytes_ += nbytes;
  if (incoming->block && is_valid) {
    (incoming->is_in_pool ? n_pooled_rows_ : n_buffered_rows_) += n_rows;
    incoming->state = Incoming::State::kStored;
    incoming->expires_at = Deadline::after(options_.keep_unclaimed_s).at();
    incoming_.erase({incoming->link->id(), incoming->offer});
    const auto request = incoming->request.lock();
    request->stored.push_back(incoming);
    if (request->grant) {  // whoever waits there copies it
      request->grant->has_news = true;
      request->grant->changed.notify_all();
    }
    return;
  }
  if (const auto grant = incoming->into; grant && grant->request) {
    for (size_t i = 0; i < incoming->rows.size(); ++i) {
      if (incoming->statuses[i] != RowStatus::kOk) continue;
      settle_row(*grant, incoming->first_row + i - grant->first_row,
                 is_valid ? RowStatus::kOk : RowStatus::kRejected);
    }
    if (is_valid) n_granted_rows_ += n_rows;
  }
  end_for_next(*incoming, is_valid ? RowStatus::kGone : RowStatus::kRejected);
  end(*incoming);
}

bool Inbox::withdrawn(const Link& link, wire::Reader body) {
  const auto offer = body.value<uint64_t>();
  if (!offer) return false;
  const std::lock_guard lock(mutex_);
  const auto found = incoming_.find({link.id(), *offer});
  if (found == incoming_.end() || found->second->state != Incoming::State::kWaiting) return true;
  const auto incoming = found->second;
  fail_rows(*incoming, RowStatus::kRejected);
  end_for_next(*incoming, RowStatus::kRejected);
  end(*incoming);
  return true;
}

// Rows of an ask that its producer will not bring. Only who was asked can say so.
bool Inbox::gone(const Link& link, uint32_t count, wire::Reader body) {
  const std::lock_guard lock(mutex_);
  uint64_t n_rows = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const auto record = take_gone(body);
    // A message is about one ask, and names none of its rows twice.
    if (!record || (n_rows += record->n_rows) > Transfers::kMaxRows) return false;
    const auto asked = asks_.find(record->ask);
    if (asked == asks_.end() || asked->second->from.get() != &link || !asked->second->grant) continue;
    const auto grant = asked->second->grant;  // closes with its last row
    const uint64_t end = uint64_t{record->first_row} + record->n_rows;
    settle_rows(*grant, record->first_row, end, RowStatus::kGone);
  }
  return true;
}

void Inbox::replied(const Link& link, const wire::Header& header, wire::Reader body) {
  std::shared_ptr<Puller> puller;
  {
    const std::lock_guard lock(mutex_);
    const auto found = pullers_.find(link.id());
    if (found != pullers_.end()) puller = found->second;
  }
  if (puller) puller->reader().replied(header, body);
}

void Inbox::lost(const Link& link) {
  std::shared_ptr<Puller> puller;
  {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Incoming>> theirs;
    for (const auto& [key, incoming] : incoming_) {
      // What is pulled just now finds that it can't be proven.
      if (key.first == link.id() && incoming->state != Incoming::State::kPulling) theirs.push_back(incoming);
    }
    for (const auto& incoming : theirs) {
      fail_rows(*incoming, RowStatus::kPeerLost);
      incoming->next_asks.clear();  // their gets are closed below
      end(*incoming);
    }
    std::vector<std::shared_ptr<Granted>> gets;
    for (const auto& grant : grants_) {
      if (grant->request->from.get() == &link) gets.push_back(grant);
    }
    for (const auto& grant : gets) close_grant(*grant, RowStatus::kPeerLost);
    const auto found = pullers_.find(link.id());
    if (found != pullers_.end()) {
      puller = found->second;
      retired_.push_back(puller);
      pullers_.erase(found);
    }
  }
  if (!puller) return;
  puller->stop();
  puller->reader().wake();
}

void Inbox::tick() {
  std::vector<std::shared_ptr<Puller>> ended;
  {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Incoming>> lapsed;
    for (const auto& [key, incoming] : incoming_) {
      if (incoming->state == Incoming::State::kWaiting && incoming->lease.passed())
        lapsed.push_back(incoming);
    }
    for (const auto& [name, request] : requests_) {
      if (request->grant) continue;
      for (const auto& stored : request->stored) {
        if (Clock::now() < stored->expires_at) continue;
        n_expired_rows_ += stored->rows.size();
        lapsed.push_back(stored);
      }
    }
    for (const auto& incoming : lapsed) end(*incoming);
    std::vector<std::shared_ptr<Granted>> late;
    for (const auto& grant : grants_) {
      if (grant->deadline.passed()) late.push_back(grant);
    }
    for (const auto& grant : late) close_grant(*grant, RowStatus::kTimedOut);
    for (auto& puller : retired_) {
      if (puller->has_ended()) ended.push_back(std::move(puller));
    }
    std::erase(retired_, nullptr);
  }
}

void Inbox::close() {
  std::vector<std::shared_ptr<Granted>> grants;
  std::vector<std::shared_ptr<Puller>> pullers;
  Jobs jobs;
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    grants.assign(grants_.begin(), grants_.end());
    grants.insert(grants.end(), writing_.begin(), writing_.end());
    jobs.assign(jobs_.begin(), jobs_.end());
    for (const auto& [link, puller] : pullers_) pullers.push_back(puller);
    pullers.insert(pullers.end(), retired_.begin(), retired_.end());
    pullers_.clear();
    retired_.clear();
  }
  for (const auto& puller : pullers) puller->stop();
  revoke(grants, RowStatus::kCanceled);
  break_off(jobs);
  for (const auto& puller : pullers) puller->close();
  if (const auto landing = landing_of_devices()) landing->area().close();
  {
    const std::lock_guard lock(landing_mutex_);
    landing_ = nullptr;  // nobody copies any more
  }
  const std::lock_guard lock(mutex_);
  incoming_.clear();
  requests_.clear();
  asks_.clear();
  buffers_.close();
}

std::vector<Transfers::Reading> Inbox::readings() {
  auto readings = buffers_.readings();
  const auto landing = landing_of_devices();
  readings.emplace_back("p2pkv_staged_to_device_bytes_total", landing ? landing->n_bytes() : 0);
  readings.emplace_back("p2pkv_direct_bytes_total", landing ? landing->n_direct_bytes() : 0);
  readings.emplace_back("p2pkv_incoming_staging_used_bytes", landing ? landing->area().used_nbytes() : 0);
  const uint64_t n_fallbacks = n_fallbacks_ + options_.peers->n_fallbacks_of_pulls();
  const std::lock_guard lock(mutex_);
  for (const Transfers::Reading& reading :
       std::initializer_list<Transfers::Reading>{{"p2pkv_open_grants", grants_.size()},
                                                 {"p2pkv_granted_rows_total", n_granted_rows_},
                                                 {"p2pkv_pulled_bytes_total", n_pulled_bytes_},
                                                 {"p2pkv_buffered_rows_total", n_buffered_rows_},
                                                 {"p2pkv_pooled_rows_total", n_pooled_rows_},
                                                 {"p2pkv_parked_offers_total", n_parked_offers_},
                                                 {"p2pkv_refused_offers_total", n_refused_offers_},
                                                 {"p2pkv_claimed_rows_total", n_claimed_rows_},
                                                 {"p2pkv_rejected_rows_total", n_rejected_rows_},
                                                 {"p2pkv_failed_rows_total", n_failed_rows_},
                                                 {"p2pkv_duplicate_rows_total", n_duplicate_rows_},
                                                 {"p2pkv_expired_rows_total", n_expired_rows_},
                                                 {"p2pkv_transfer_fallbacks_total", n_fallbacks}}) {
    readings.push_back(reading);
  }
  return readings;
}

}  // namespace p2pkv::offers
