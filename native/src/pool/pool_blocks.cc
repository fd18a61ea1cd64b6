// How the pool finds blocks for new pages, by eviction if need be, and gives them back.
#include <algorithm>

#include "pool/pool.h"

namespace p2pkv {

// kNone, with the room's refusal, if there is none to be had. Lets others in meanwhile.
uint32_t Pool::allocate(uint64_t n_granules, Room* room) {
  const PoolShare& share = room->share;
  auto search = blocks_.search_for(static_cast<uint32_t>(std::max<uint64_t>(n_granules, 1)),
                                   {share.account, share.nbytes / options_.granule});
  for (;;) {
    const PageBlocks::Found found = blocks_.reserve(&search);
    if (found == PageBlocks::Found::kBlock) return search.block;
    if (found == PageBlocks::Found::kNoRoom) {
      room->refusal = PoolStatus::kNoRoom;
      room->is_share_full = search.is_confined();
      return PageBlocks::kNone;
    }
    let_in(room);
    if (room->deadline.passed()) {
      blocks_.give_up(search);
      room->refusal = PoolStatus::kTimedOut;
      return PageBlocks::kNone;
    }
  }
}

void Pool::let_in(Room* room) {
  const uint64_t before = n_hidden_;
  mutex_.let_in();
  room->n_hidden_by_others += n_hidden_ - before;
}

// Starts loading what entering a page with this key will need.
void Pool::prefetch(const Key& key) const {
  pages_.prefetch(key);
  if (index_) index_->prefetch(key);
}

// The page is committed, and can be found from now on, here and by who is shown this pool.
void Pool::enter(uint32_t granule) {
  pages_.insert(granule);
  if (index_) index_->insert(pages_[granule].key, granule);
}

void Pool::leave(uint32_t granule) {
  if (index_) index_->erase(pages_[granule].key, granule);
  pages_.erase(granule);
}

// The page goes to make room for another.
void Pool::evicted(uint32_t granule) {
  log_.push(pages_[granule].key, location_of(granule));
  note(granule, PageEvent::kEvicted);
  leave(granule);
  ++n_evicted_;
  ++n_hidden_;
}

// Takes a committed page out of sight.
void Pool::take_out(uint32_t granule, PageEvent why) {
  note(granule, why);
  leave(granule);
  ++n_hidden_;
  blocks_.retract(granule);
}

void Pool::note(uint32_t granule, PageEvent event) {
  if (options_.changes) options_.changes->push(pages_[granule].key, Medium::kMemory, event);
}

void Pool::note_refused(const Key& key, PoolStatus status) {
  if (!options_.changes) return;
  if (status == PoolStatus::kNoRoom) options_.changes->note_refused(key, PageEvent::kNoRoom);
  if (status == PoolStatus::kTimedOut) options_.changes->note_refused(key, PageEvent::kTooLate);
}

void Pool::release_if_unheld(uint32_t granule) {
  if (pages_[granule].state == PageState::kRetracted && !pages_[granule].is_held()) blocks_.drop(granule);
}

}  // namespace p2pkv
