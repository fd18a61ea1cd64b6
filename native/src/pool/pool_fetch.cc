// The way of pages out of the pool: copied into memory of the caller, or taken where they lie.

#include <algorithm>
#include <functional>

#include "base/copy.h"
#include "base/copy_team.h"
#include "pool/pool.h"

namespace p2pkv {
namespace {

// So much is taken between two looks at the deadline: a device takes 1 to 5 ms for it.
constexpr uint64_t kTakenAtOnce = 64 << 20;

}  // namespace

bool Pool::copy_out(const PageBatch& batch, size_t i, uint32_t granule) const {
  const uint8_t* from = data_at(granule);
  // what is held keeps its record as well
  if (pages_[granule].packed != 0) return unpack_out(batch, i, granule);
  for (size_t k = 0; k < batch.n_pieces; ++k) {
    const Piece& piece = batch.pieces[i * batch.n_pieces + k];
    copy_bytes(reinterpret_cast<void*>(piece.address), from, static_cast<size_t>(piece.nbytes));
    from += piece.nbytes;
  }
  return true;
}

// Has a taker take pages that are held, so much at a time that the deadline is heard of. Those that it has
// not taken become misses.
void Pool::have_taken(const std::vector<uint32_t>& granules, PageTaker& taker, FetchStatus* statuses,
                      const Deadline& deadline) {
  const auto land = [&] { taker.land({region_->base(), region_->nbytes(), false, region_->kept()}); };
  uint64_t nbytes = 0;
  for (size_t i = 0; i < granules.size() && !deadline.passed(); ++i) {
    if (granules[i] == PageTable::kNone || pages_[granules[i]].packed != 0) continue;
    taker.take(i, data_at(granules[i]));
    nbytes += pages_[granules[i]].length;
    if (nbytes < kTakenAtOnce) continue;
    land();
    nbytes = 0;
  }
  if (nbytes > 0) land();
  for (size_t i = 0; i < granules.size(); ++i) {
    if (granules[i] != PageTable::kNone && !taker.has(i)) statuses[i] = FetchStatus::kMiss;
  }
}

void Pool::fetch(const PageBatch& batch, FetchStatus* statuses, const Deadline& deadline, PageTaker* taker) {
  std::vector<uint32_t> granules(batch.n_pages, PageTable::kNone);
  uint64_t nbytes = 0;
  {
    const Lock lock(mutex_);
    for (size_t i = 0; i < batch.n_pages; ++i) pages_.prefetch(batch.keys[i]);
    for (size_t i = batch.n_pages; i-- > 0;) {
      const uint32_t granule = pages_.find(batch.keys[i]);
      statuses[i] = FetchStatus::kMiss;
      if (granule == PageTable::kNone) continue;
      statuses[i] = FetchStatus::kOtherLength;
      if (pages_[granule].length != batch.length_of(i)) continue;
      statuses[i] = FetchStatus::kHit;
      ++pages_[granule].n_copies;
      blocks_.touch(granule);
      granules[i] = granule;
      nbytes += pages_[granule].length;
    }
  }
  const auto copy_page = [&](size_t i) {
    if (granules[i] != PageTable::kNone && !copy_out(batch, i, granules[i]))
      statuses[i] = FetchStatus::kUnreadable;
  };
  if (taker != nullptr) have_taken(granules, *taker, statuses, deadline);
  const size_t n_copied = taker != nullptr ? batch.n_pages
                                           : make_copies({batch.n_pages, nbytes, std::ref(copy_page)},
                                                         [&] { return deadline.passed(); });
  for (size_t i = n_copied; i < batch.n_pages; ++i) {
    if (granules[i] != PageTable::kNone) statuses[i] = FetchStatus::kTimedOut;
  }
  const Lock lock(mutex_);
  for (size_t i = 0; i < batch.n_pages; ++i) {
    const uint32_t granule = granules[i];
    if (granule == PageTable::kNone) continue;
    n_guest_hits_ += statuses[i] == FetchStatus::kHit ? pages_[granule].is_guest : 0;
    --pages_[granule].n_copies;
    release_if_unheld(granule);
  }
}

}  // namespace p2pkv
