// Pages that go because somebody has more of the pool than he may have, and not because they are the oldest.
#include "pool/pool.h"

namespace p2pkv {

void Pool::review(StoredPage* pages, size_t n, TakeOut which) {
  uint64_t n_taken = 0;
  {
    const Lock lock(mutex_);
    expire_pins();
    for (size_t i = 0; i < n; ++i) pages_.prefetch(pages[i].key);
    for (size_t i = 0; i < n; ++i) {
      StoredPage& page = pages[i];
      const uint32_t granule = pages_.find(page.key);
      if (granule == PageTable::kNone || pages_[granule].generation != page.generation) {
        page.fate = PageFate::kGone;
        continue;
      }
      const uint64_t stamp = pages_[granule].stamp;
      page.fate = pages_[granule].is_held() ? PageFate::kHeld
                  : stamp > page.stamp      ? PageFate::kUsed
                                            : PageFate::kUnused;
      page.stamp = stamp;
      if (page.fate == PageFate::kHeld || which == TakeOut::kNone) continue;
      if (page.fate == PageFate::kUsed && which == TakeOut::kUnused) continue;
      log_.push(page.key, location_of(granule));
      take_out(granule, PageEvent::kEvicted);
      page.fate = PageFate::kTakenOut;
      ++n_taken;
    }
    n_evicted_ += n_taken;
  }
  if (n_taken > 0) log_.announce();
}

}  // namespace p2pkv
