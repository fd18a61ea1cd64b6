// How the pool finds blocks for new pages, by eviction if need be, and gives them back.
#include <cstdio>
#include <cstdlib>

#include "page/words.h"
#include "pool/pool.h"

namespace p2pkv {

namespace {

// Blocks looked at before others are let in: 0.2 ms of cache misses.
constexpr size_t kStepsPerTurn = 1024;

}  // namespace

// kNone, with the room's refusal, if there is none to be had.
uint32_t Pool::allocate(uint32_t order, Room* room) {
  uint32_t granule = buddy_.allocate(order);
  if (granule == Buddy::kNone) granule = make_room(order, room);
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

// A block of this order, by evicting the page used longest ago with all that shares the aligned window such a
// block would take: else many small pages, each in use now and then, would keep a large one out for ever.
// kNone, with the room's refusal, if every window has something that must stay. Lets others in meanwhile.
uint32_t Pool::make_room(uint32_t order, Room* room) {
  std::vector<bool> must_stay;  // windows: each is looked at once, not once for each of its pages
  size_t n_steps = 0;
  uint32_t victim = pages_.oldest();
  for (uint32_t left = pages_.size(); left > 0 && victim != PageTable::kNone; --left) {
    const uint32_t next = pages_.newer(victim);
    const size_t window = victim >> order;
    if (pages_[victim].is_held()) {
      pages_.touch(victim);  // it is in use; and the next search need not pass it again
    } else if (must_stay.empty() || !must_stay[window]) {
      if (collect_window(victim, order, &n_steps)) {
        evict_window();
        return buddy_.allocate(order);
      }
      if (must_stay.empty()) must_stay.resize((buddy_.n_granules() >> order) + 1);
      must_stay[window] = true;
    }
    victim = next;
    if (++n_steps < kStepsPerTurn) continue;
    n_steps = 0;
    const uint64_t generation = victim == PageTable::kNone ? 0 : pages_[victim].generation;
    mutex_.let_in();
    if (room->deadline.passed()) {
      room->refusal = PoolStatus::kTimedOut;
      return Buddy::kNone;
    }
    if (const uint32_t granule = buddy_.allocate(order); granule != Buddy::kNone) return granule;
    // It may have been used, so that all others are older, or its block be another page's: the search begins
    // anew.
    const bool is_same = victim != PageTable::kNone && pages_[victim].state == PageState::kCommitted &&
                         pages_[victim].generation == generation;
    if (!is_same || pages_.newer(victim) == PageTable::kNone) victim = pages_.oldest();
  }
  room->refusal = PoolStatus::kNoRoom;
  return Buddy::kNone;
}

// Collects in `window_` the pages of the aligned window of this order around `granule`; false if one of them
// must stay.
bool Pool::collect_window(uint32_t granule, uint32_t order, size_t* n_steps) {
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
    ++*n_steps;
    const auto block = static_cast<uint32_t>(at);
    if (buddy_.is_free(block)) continue;
    if (pages_[block].state != PageState::kCommitted || pages_[block].is_held()) return false;
    window_.push_back(block);
  }
  return true;
}

void Pool::evict_window() {
  for (const uint32_t granule : window_) {
    log_.push(pages_[granule].key, location_of(granule));
    hide(granule);
    ++n_evicted_;
  }
  for (const uint32_t granule : window_) drop(granule);
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
