// Offers of device memory: when each part is in staging.
#include <algorithm>
#include <utility>

#include "offers/outbox_parts.h"
#include "page/words.h"

namespace p2pkv::offers {

uint64_t copied_nbytes(const PlacedRows& placed) {
  uint64_t nbytes = 0;
  for (const PlacedRows::Row& row : placed.rows) nbytes += StagingArea::padded(row.length);
  return nbytes;
}

std::vector<cuda::DeviceCopy> copies_to(uint8_t* host, const PlacedRows& placed) {
  std::vector<cuda::DeviceCopy> copies;
  copies.reserve(placed.rows.size());
  for (const PlacedRows::Row& row : placed.rows) {
    copies.push_back({placed.address_of(row), host, row.length});
    host += StagingArea::padded(row.length);
  }
  return copies;
}

bool Outbox::start_staging(std::shared_ptr<StagingArea> staging) {
  const std::lock_guard lock(mutex_);
  staging_ = std::move(staging);
  return stager_.start("p2pkv-stage", [this] { stage(); });
}

void Outbox::queue_staging(const std::shared_ptr<Outgoing>& offer) {
  const bool is_queued = copying_ == offer || std::find(staging_queue_.begin(), staging_queue_.end(),
                                                        offer) != staging_queue_.end();
  if (is_queued) return;
  staging_queue_.push_back(offer);
  to_stage_.notify_all();
}

void Outbox::stage() {
  std::unique_lock lock(mutex_);
  while (true) {
    to_stage_.wait(lock, [this] { return is_closed_ || take_first(); });
    if (is_closed_) break;
    stage_one(lock);
  }
  staging_queue_.clear();
  room_.release();
}

// Whether somebody who is to be told of it reads it from staging alone.
bool Outbox::needs_room(const Outgoing& offer) const {
  if (offer.staged) return false;
  bool is_asked = false;
  for (const Ask& ask : asks_) {
    if (!is_wanted(ask, offer)) continue;
    is_asked = true;
    if (!takes_directly(offer, *ask.link)) return true;
  }
  const auto link = offer.link.lock();
  return !is_asked && !(link && takes_directly(offer, *link));
}

// Whether there is an offer to stage, and room for it where it needs some.
bool Outbox::take_first() {
  while (!staging_queue_.empty() && staging_queue_.front()->is_done) staging_queue_.pop_front();
  if (staging_queue_.empty()) return false;
  if (needs_room(*staging_queue_.front())) {
    room_ = staging_->try_borrow(copied_nbytes(staging_queue_.front()->placed));
    if (!room_) return false;
  }
  copying_ = std::move(staging_queue_.front());
  staging_queue_.pop_front();
  return true;
}

void Outbox::stage_one(std::unique_lock<std::mutex>& lock) {
  const auto offer = copying_;
  auto outcome = cuda::CopyOutcome::kFailed;
  auto waited = cuda::StreamOutcome::kDone;
  std::string error;
  const bool was_lost = offer->device->is_lost();
  const bool is_to_copy = bool(room_);
  lock.unlock();
  if (offer->point) waited = offer->point->wait(offer->lease, [&] { return is_unwanted(*offer); }, &error);
  if (waited == cuda::StreamOutcome::kDone && !is_to_copy) outcome = cuda::CopyOutcome::kDone;
  if (waited == cuda::StreamOutcome::kDone && is_to_copy)
    outcome = offer->device->copy(copies_to(room_.data(), offer->placed), cuda::Direction::kToHost, &error,
                                  cuda::HostMemory::kLocked);
  lock.lock();
  copying_ = nullptr;
  std::vector<Post> posts;
  if (outcome == cuda::CopyOutcome::kLost) room_.abandon();
  if (outcome == cuda::CopyOutcome::kDone) {
    if (is_to_copy) n_staged_bytes_ += offer->placed.nbytes();
    if (!offer->is_done && !offer->stowed && (offer->to != 0 || is_asked_for(*offer))) {
      if (is_to_copy) offer->staged = std::move(room_);
      offer->is_ready = true;
      tell(*offer, &posts);
    }
    if (!is_to_copy) tell_behind(*offer, &posts);
  } else if (offer->stowed) {
    // Somebody else's copy of it is offered by now.
  } else if (!offer->is_done && waited == cuda::StreamOutcome::kTimedOut) {
    end(*offer, RowStatus::kTimedOut, &posts);  // its lease has passed
  } else if (!offer->is_done) {
    if (!was_lost) device_failure_ = error;  // else it says no more than that
    end(*offer, RowStatus::kDeviceFailed, &posts);
  }
  room_.release();
  offer->settled.notify_all();
  copied_.notify_all();
  send_if_several(&posts);
  lock.unlock();
  send(posts);
  lock.lock();
}

// Parts that wait for the same mark, and need no room either: who reads them has them all at once.
void Outbox::tell_behind(const Outgoing& first, std::vector<Post>* posts) {
  std::vector<std::shared_ptr<Outgoing>> ready;
  std::erase_if(staging_queue_, [&](const auto& offer) {
    const bool is_ready =
        offer->point == first.point && !offer->is_done && !offer->stowed && !needs_room(*offer);
    if (is_ready) ready.push_back(offer);
    return is_ready;
  });
  for (const auto& offer : ready) {
    offer->is_ready = true;
    tell(*offer, posts);
  }
}

bool Outbox::is_unwanted(const Outgoing& offer) {
  const std::lock_guard lock(mutex_);
  return offer.is_done || is_closed_;
}

// Its bytes may be others' from here on.
void Outbox::unstage(Outgoing& offer) {
  if (!offer.staged) return;
  offer.staged.release();
  to_stage_.notify_all();
}

// Makes room of offers that were asked for, and that nobody asks for any more.
void Outbox::unstage_unwanted(std::vector<Post>* posts) {
  if (!staging_) return;
  std::erase_if(staging_queue_,
                [this](const auto& offer) { return offer->to == 0 && !is_asked_for(*offer); });
  std::vector<std::shared_ptr<Outgoing>> unwanted;
  for (const auto& [id, offer] : live_) {
    if (offer->to == 0 && offer->staged && !is_asked_for(*offer)) unwanted.push_back(offer);
  }
  for (const auto& offer : unwanted) renumber(offer, posts);
}

// Has what was told of it mean nothing any more: its rows are about to lie elsewhere.
void Outbox::renumber(const std::shared_ptr<Outgoing>& offer, std::vector<Post>* posts) {
  for (const auto& told : std::exchange(offer->told, {})) {
    const auto link = told.lock();
    if (!link || link->is_lost()) continue;
    std::string body;
    wire::append(body, offer->id);
    posts->push_back({link, Kind::kWithdrawn, std::move(body)});
  }
  live_.erase(offer->id);
  offer->id = ++next_id_;
  live_.emplace(offer->id, offer);
  store_fence();
  unstage(*offer);
}

}  // namespace p2pkv::offers
