// How the pool finds blocks for new pages, by eviction if need be, and gives them back.
#include <cstdio>
#include <cstdlib>

#include "p2pkv/pool.h"
#include "p2pkv/words.h"

namespace p2pkv {

uint32_t Pool::allocate(uint32_t order) {
  uint32_t granule = buddy_.allocate(order);
  if (granule == Buddy::kNone && make_room(order)) granule = buddy_.allocate(order);
  if (granule == Buddy::kNone) return granule;
  const uint64_t word = load_word(word_at(granule));
  if (is_committed(word)) {
    // Going on would hand readers another page's bytes as right.
    std::fprintf(stderr, "p2pkv: bug: the pool's free granule %u has the even word %llu\n", granule,
                 static_cast<unsigned long long>(word));
    std::abort();
  }
  pages_[granule] = Page{};
  pages_[granule].generation = word;
  pages_[granule].state = PageState::kReserved;
  return granule;
}

// Frees a block of this order by evicting the page used longest ago, with all that shares the aligned window
// such a block would take: else many small pages, each in use now and then, would keep a large one out for
// ever.
bool Pool::make_room(uint32_t order) {
  uint32_t victim = pages_.oldest();
  for (uint32_t left = pages_.size(); left > 0 && victim != PageTable::kNone; --left) {
    const uint32_t next = pages_.newer(victim);
    if (pages_[victim].is_held()) {
      pages_.touch(victim);  // it is in use; and the next search need not pass it again
    } else if (collect_window(victim, order)) {
      for (const uint32_t granule : window_) {
        log_.push(pages_[granule].key, location_of(granule));
        hide(granule);
        ++n_evicted_;
      }
      for (const uint32_t granule : window_) drop(granule);
      return true;
    }
    victim = next;
  }
  return false;
}

// Collects in `window_` the pages of the aligned window of this order around `granule`; false if one of them
// must stay.
bool Pool::collect_window(uint32_t granule, uint32_t order) {
  window_.clear();
  if (buddy_.order_of(granule) >= order) {
    window_.push_back(granule);
    return true;
  }
  const uint64_t nbits = uint64_t{1} << order;
  const uint64_t begin = granule & ~(nbits - 1);
  const uint64_t end = begin + nbits;
  if (end > buddy_.n_granules()) return false;
  for (uint64_t at = begin; at < end; at += uint64_t{1} << buddy_.order_of(static_cast<uint32_t>(at))) {
    const auto block = static_cast<uint32_t>(at);
    if (buddy_.is_free(block)) continue;
    if (pages_[block].state != PageState::kCommitted || pages_[block].is_held()) return false;
    window_.push_back(block);
  }
  return true;
}

// Takes a committed page out of sight; its block stays allocated.
void Pool::hide(uint32_t granule) {
  Page& page = pages_[granule];
  // Before the block can be freed: a reader that overlaps its reuse must find the page stale.
  ++page.generation;
  store_word(word_at(granule), page.generation);
  pages_.erase(granule);
  page.state = PageState::kRetracted;
  ++n_hidden_;
}

void Pool::drop(uint32_t granule) {
  pages_[granule].state = PageState::kNone;
  buddy_.release(granule);
}

void Pool::release_if_unheld(uint32_t granule) {
  if (pages_[granule].state == PageState::kRetracted && !pages_[granule].is_held()) drop(granule);
}

}  // namespace p2pkv
