// Publishes of who has a share of the pool.
#include "pool/pool.h"

namespace p2pkv {

// What the batch has that is there already: it must not go for the rest, for it would be stored anew.
void Pool::hold_existing(const PageBatch& batch, std::vector<Draft>* drafts) {
  for (size_t i = 0; i < batch.n_pages; ++i) {
    const uint32_t existing = pages_.find(batch.keys[i]);
    if (existing == PageTable::kNone) continue;
    (*drafts)[i].granule = existing;
    ++pages_[existing].n_copies;
  }
}

// Others may have taken it out since; then there is nothing to hold.
bool Pool::still_holds(Draft* draft) {
  if (draft->granule == PageBlocks::kNone) return false;
  if (pages_[draft->granule].state == PageState::kCommitted) return true;
  --pages_[draft->granule].n_copies;
  release_if_unheld(draft->granule);
  draft->granule = PageBlocks::kNone;
  return false;
}

void Pool::count_no_room(const Room& room) {
  ++n_no_room_;
  if (room.is_share_full) ++n_over_share_;
}

uint64_t Pool::charged_nbytes(uint32_t account) {
  const Lock lock(mutex_);
  return uint64_t{options_.granule} * blocks_.n_charged(account);
}

ShareStats Pool::share_stats() {
  const Lock lock(mutex_);
  return {blocks_.n_gone_for_shares(), n_over_share_, blocks_.n_gone_for_growth()};
}

}  // namespace p2pkv
