#include <algorithm>
#include <utility>

#include "net/tokens.h"
#include "offers/outbox_parts.h"
#include "page/words.h"

namespace p2pkv::offers {

Outbox::Outbox(double remember_s, std::vector<std::string> ways) : ways_(std::move(ways)), gone_(remember_s) {
  fill_random(&next_id_, sizeof next_id_);
  next_id_ >>= 1;
}

void Outbox::Outgoing::wait(const Deadline& deadline) {
  std::unique_lock lock(home_->mutex_);
  settled.wait_until(lock, deadline.at(), [this] { return is_over(); });
}

void Outbox::Outgoing::withdraw(RowStatus reason) {
  std::vector<Post> posts;
  {
    std::unique_lock lock(home_->mutex_);
    if (!is_done) ++home_->n_withdrawn_;
    home_->end(*this, reason, &posts);
    settled.wait(lock, [this] { return is_over(); });
  }
  send(posts);
}

bool Outbox::Outgoing::done() {
  const std::lock_guard lock(home_->mutex_);
  return is_over();
}

RowStatuses Outbox::Outgoing::statuses() {
  const std::lock_guard lock(home_->mutex_);
  return statuses_now;
}

std::shared_ptr<Offer> Outbox::offer(uint64_t to, const std::shared_ptr<Link>& link, Rows rows,
                                     PlacedRows placed, const Deadline& lease, std::string* error) {
  auto parts = split(rows, std::move(placed), lease, error);
  if (parts.empty()) return nullptr;
  std::vector<Post> posts;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& part : parts) {
      part->to = to;
      part->link = link;
      if (!overlaps(*part)) continue;
      *error = "rows of request '" + part->request + "' from " + std::to_string(part->first_row) +
               " on are offered already";
      return nullptr;
    }
    for (const auto& part : parts) add(part, link, &posts);
    send_if_several(&posts);
  }
  send(posts);
  // A link that was cut meanwhile has told its loss to those that were offered before.
  if (link && link->is_lost()) lost(*link);
  if (parts.size() == 1) return parts.front();
  return std::make_shared<Parted>(std::move(parts));
}

void Outbox::add(const std::shared_ptr<Outgoing>& offer, const std::shared_ptr<Link>& link,
                 std::vector<Post>* posts) {
  ++n_offered_;
  const bool has_memory = !offer->placed.lie_in_closed_memory();
  if (is_closed_ || !has_memory || (offer->to != 0 && !link)) {
    offer->is_done = true;
    const RowStatus gone = has_memory ? RowStatus::kPeerLost : RowStatus::kRejected;
    const RowStatus reason = is_closed_ ? RowStatus::kCanceled : gone;
    std::fill(offer->statuses_now.begin(), offer->statuses_now.end(), reason);
    remember_gone(*offer);
    for (const Ask& ask : asks_) {
      if (is_wanted(ask, *offer)) refuse_gone(ask, posts);
    }
    return;
  }
  offer->id = ++next_id_;
  live_.emplace(offer->id, offer);
  by_request_[offer->request].emplace(Key{offer->to, offer->first_row}, offer);
  const bool is_ready = offer->device && !offer->point && !needs_room(*offer);
  if (is_ready) offer->is_ready = true;
  if (!offer->device || is_ready) {
    tell(*offer, posts);
  } else if (offer->to != 0 || is_asked_for(*offer)) {
    queue_staging(offer);
  }
}

bool Outbox::overlaps(const Outgoing& offer) {
  const auto found = by_request_.find(offer.request);
  if (found == by_request_.end()) return false;
  const auto& offers = found->second;
  const auto after = offers.lower_bound({offer.to, offer.first_row});
  if (after != offers.end() && after->first.first == offer.to &&
      after->first.second < offer.first_row + offer.n_rows())
    return true;
  if (after == offers.begin()) return false;
  const auto& [key, before] = *std::prev(after);
  return key.first == offer.to && before->first_row + before->n_rows() > offer.first_row;
}

void Outbox::withdraw_memory(uint32_t memory_id) {
  std::vector<Post> posts;
  {
    std::unique_lock lock(mutex_);
    std::vector<std::shared_ptr<Outgoing>> ending;
    for (const auto& [id, offer] : live_) {
      if (offer->placed.lie_in(memory_id) && !offer->stowed) ending.push_back(offer);
    }
    for (const auto& offer : ending) end(*offer, RowStatus::kRejected, &posts);
    n_withdrawn_ += ending.size();
    // Also of an offer that had ended before: its copy from the memory may still be under way.
    copied_.wait(lock, [&] {
      const auto lies_there = [&](const Outgoing* offer) { return offer->placed.lie_in(memory_id); };
      return (!copying_ || !lies_there(copying_.get())) &&
             std::none_of(stowing_.begin(), stowing_.end(), lies_there);
    });
  }
  send(posts);
}

bool Outbox::pulled(const std::shared_ptr<Link>& link, uint32_t count, wire::Reader body) {
  std::string verdicts;
  std::vector<Post> posts;
  {
    const std::lock_guard lock(mutex_);
    for (uint32_t i = 0; i < count; ++i) {
      if (!judge(link, body, &verdicts, &posts)) return false;
    }
  }
  link->post(Kind::kSettled, 0, count, verdicts);
  send(posts);
  return true;
}

// Takes one receiver's report and says whether the offer was valid until now.
bool Outbox::judge(const std::shared_ptr<Link>& link, wire::Reader& body, std::string* verdicts,
                   std::vector<Post>* posts) {
  const auto message = take_pulled(body);
  if (!message) return false;
  const auto& [record, statuses] = *message;
  const auto found = live_.find(record.offer);
  // Only who was told of it can have pulled it: others may guess its number, which ends it for nobody.
  const bool is_valid =
      found != live_.end() && found->second->n_rows() == record.n_rows && found->second->was_told(*link);
  wire::append(*verdicts, SettledRecord{record.offer, is_valid ? 1u : 0u, 0});
  if (!is_valid) {
    ++n_late_;
    return true;
  }
  const auto taken = found->second;  // its end forgets it
  Outgoing& offer = *taken;
  for (size_t row = 0; row < statuses.size(); ++row) {
    const RowStatus status = statuses[row];
    offer.statuses_now[row] = status <= RowStatus::kDeviceFailed ? status : RowStatus::kCanceled;
    if (status == RowStatus::kOk) {
      ++n_taken_;
      n_taken_bytes_ += offer.placed.rows[row].length;
    }
  }
  // The receiver knows that it ended: nobody is to be told.
  offer.told.clear();
  end(offer, RowStatus::kOutOfRange, nullptr);
  end_rest(offer, posts);
  return true;
}

// From here on no pull of the offer can be proven: whoever pulls it is told so when it reports.
void Outbox::end(Outgoing& offer, RowStatus reason, std::vector<Post>* posts) {
  if (offer.is_done) return;
  offer.is_done = true;
  for (RowStatus& status : offer.statuses_now) {
    if (status == RowStatus::kPending) status = reason;
  }
  // Who waits for what never came into staging is told of it only to hear that it is withdrawn.
  if (posts != nullptr && offer.lies_on_device() && !offer.staged) tell(offer, posts);
  for (const auto& link : offer.told) {
    const auto told = link.lock();
    if (!told || told->is_lost()) continue;
    std::string body;
    wire::append(body, offer.id);
    posts->push_back({told, Kind::kWithdrawn, std::move(body)});
  }
  offer.told.clear();
  remember_gone(offer);
  const auto requests = by_request_.find(offer.request);
  if (requests != by_request_.end()) {
    requests->second.erase({offer.to, offer.first_row});
    if (requests->second.empty()) by_request_.erase(requests);
  }
  const auto self = live_.extract(offer.id);  // kept until its waiters have been told
  // What the caller stores into the memory from now on comes after the end of the offer.
  store_fence();
  unstage(offer);
  offer.stowed.reset();
  offer.settled.notify_all();
}

void Outbox::lost(const Link& link) {
  std::vector<Post> posts;
  {
    const std::lock_guard lock(mutex_);
    forget(link);
    unstage_unwanted(&posts);
  }
  send(posts);
}

void Outbox::forget(const Link& link) {
  asks_.remove_if([&link](const Ask& ask) { return ask.link.get() == &link; });
  std::vector<std::shared_ptr<Outgoing>> ending;
  for (const auto& [id, offer] : live_) {
    if (offer->to == 0) continue;
    const bool is_to_be_told = offer->told.empty() && offer->link.lock().get() == &link;
    if (offer->was_told(link) || is_to_be_told) ending.push_back(offer);
  }
  for (const auto& offer : ending) {
    offer->told.clear();
    end(*offer, RowStatus::kPeerLost, nullptr);
  }
}

std::shared_ptr<StagingArea> Outbox::staging_of_devices() {
  const std::lock_guard lock(mutex_);
  return staging_;
}

std::string Outbox::device_failure() {
  const std::lock_guard lock(mutex_);
  return device_failure_;
}

void Outbox::tick() {
  std::vector<Post> posts;
  {
    const std::lock_guard lock(mutex_);
    const bool asks_ended = asks_.remove_if([](const Ask& ask) { return ask.deadline.passed(); }) > 0;
    std::vector<std::shared_ptr<Outgoing>> ending;
    for (const auto& [id, offer] : live_) {
      if (offer->lease.passed()) ending.push_back(offer);
    }
    for (const auto& offer : ending) end(*offer, RowStatus::kTimedOut, &posts);
    n_lapsed_ += ending.size();
    gone_.tick();
    if (asks_ended) unstage_unwanted(&posts);
  }
  send(posts);
}

void Outbox::close() {
  std::vector<Post> posts;
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    asks_.clear();
    std::vector<std::shared_ptr<Outgoing>> ending;
    for (const auto& [id, offer] : live_) ending.push_back(offer);
    for (const auto& offer : ending) end(*offer, RowStatus::kCanceled, &posts);
    to_stage_.notify_all();
  }
  send(posts);
  stager_.join();
  {
    // They read from the caller's memory, and write to the pool, which is closed next.
    std::unique_lock lock(mutex_);
    copied_.wait(lock, [this] { return stowing_.empty(); });
  }
  const auto staging = staging_of_devices();
  if (!staging) return;
  staging->close();
  const std::lock_guard lock(mutex_);
  staging_ = nullptr;
}

// Those of several asks of one node have to go out before the verdict on the first does, which waits for the
// lock: else the second is told of what is over, and takes it in vain.
void Outbox::send_if_several(std::vector<Post>* posts) {
  if (posts->size() > 1) send(std::exchange(*posts, {}));
}

void Outbox::send(const std::vector<Post>& posts) {
  for (const Post& post : posts) post.link->post(post.kind, 0, post.count, post.body);
}

std::vector<Transfers::Reading> Outbox::readings() {
  const std::lock_guard lock(mutex_);
  return {{"p2pkv_open_offers", live_.size()},
          {"p2pkv_offers_total", n_offered_},
          {"p2pkv_taken_rows_total", n_taken_},
          {"p2pkv_taken_bytes_total", n_taken_bytes_},
          {"p2pkv_withdrawn_offers_total", n_withdrawn_},
          {"p2pkv_lapsed_offers_total", n_lapsed_},
          {"p2pkv_late_pulls_total", n_late_},
          {"p2pkv_refused_asks_total", n_refused_asks_},
          {"p2pkv_gone_asks_total", n_gone_asks_},
          {"p2pkv_stowed_offers_total", n_stowed_},
          {"p2pkv_stowed_bytes_total", n_stowed_bytes_},
          {"p2pkv_unstowed_offers_total", n_unstowed_},
          {"p2pkv_staged_to_host_bytes_total", n_staged_bytes_},
          {"p2pkv_outgoing_staging_used_bytes", staging_ ? staging_->used_nbytes() : 0}};
}

}  // namespace p2pkv::offers
