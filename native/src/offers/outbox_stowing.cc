// The rows of offers that nobody takes for long are copied to the buddy pool, and offered from there.
#include <utility>

#include "base/copy.h"
#include "offers/outbox_parts.h"

namespace p2pkv::offers {

std::optional<Stowed> Outbox::stow(const std::shared_ptr<Outgoing>& offer) {
  std::unique_lock lock(mutex_);
  copied_.wait(lock, [&] { return !stowing_.contains(offer.get()); });  // another call's, which may be it
  if (!offer->is_done && !offer->stowed && pool_ && offer->to == 0) stow_now(offer, lock);
  // A copy to staging that had been begun before still reads from the caller's memory.
  copied_.wait(lock, [&] { return copying_ != offer; });
  const auto block = offer->stowed;
  lock.unlock();
  if (!block) return std::nullopt;
  Stowed stowed{{}, {block}};
  int64_t address = reinterpret_cast<int64_t>(block->bytes());
  for (const PlacedRows::Row& row : offer->placed.rows) {
    stowed.spans.push_back({address, static_cast<int64_t>(row.length)});
    address += static_cast<int64_t>(StagingArea::padded(row.length));
  }
  return stowed;
}

void Outbox::stow_now(const std::shared_ptr<Outgoing>& offer, std::unique_lock<std::mutex>& lock) {
  const auto room = pool_->allocate(copied_nbytes(offer->placed));
  if (!room) {
    ++n_unstowed_;
    return;
  }
  const auto block = std::make_shared<Block>(pool_, *room);
  stowing_.insert(offer.get());
  lock.unlock();
  const bool is_copied = copy_to(*block, *offer);
  std::vector<Post> posts;
  lock.lock();
  stowing_.erase(offer.get());
  if (!offer->is_done) {
    if (is_copied) offer_copy(offer, block, &posts);
    n_unstowed_ += is_copied ? 0 : 1;
  }
  offer->settled.notify_all();
  copied_.notify_all();
  send_if_several(&posts);
  lock.unlock();
  send(posts);
  lock.lock();
}

// Without the lock. False: it is not wanted any more, or a device has failed.
bool Outbox::copy_to(Block& block, Outgoing& offer) {
  if (!offer.device) {
    uint8_t* to = block.bytes();
    for (const PlacedRows::Row& row : offer.placed.rows) {
      copy_bytes(to, reinterpret_cast<const uint8_t*>(offer.placed.address_of(row)), row.length);
      to += StagingArea::padded(row.length);
    }
    return true;
  }
  std::string error;
  const auto is_over = [&] { return is_unwanted(offer); };
  if (offer.point && offer.point->wait(offer.lease, is_over, &error) != cuda::StreamOutcome::kDone)
    return false;
  const auto copies = copies_to(block.bytes(), offer.placed);
  const auto outcome = offer.device->copy(copies, cuda::Direction::kToHost, &error);
  if (outcome == cuda::CopyOutcome::kLost) block.abandon();
  return outcome == cuda::CopyOutcome::kDone;
}

// From here on its own memory is the caller's.
void Outbox::offer_copy(const std::shared_ptr<Outgoing>& offer, std::shared_ptr<Block> block,
                        std::vector<Post>* posts) {
  ++n_stowed_;
  n_stowed_bytes_ += offer->placed.nbytes();
  std::erase(staging_queue_, offer);
  renumber(offer, posts);
  offer->stowed = std::move(block);
  tell(*offer, posts);
}

}  // namespace p2pkv::offers
