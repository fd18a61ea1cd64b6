// How a page finds its block: in its size's window, in free room, in place of its size's oldest page, or in a
// new window where pages are oldest.
#include <algorithm>
#include <utility>

#include "pool/page_blocks.h"

namespace p2pkv {
namespace {

// Pages that turn out to be held, made young so that the next search need not pass them again.
constexpr int kMostPassed = 64;
// Windows that one search opens: a size with pages of its own can still take the oldest of them.
constexpr uint32_t kMostWindows = 2;
constexpr uint32_t kMostFirstWindows = 8;
// A window is this share of the pool at most, and a size that wanted nothing for as long as an eighth of the
// pool was committed sleeps.
constexpr uint32_t kWindowShare = 16;
constexpr uint32_t kSleepShare = 8;

}  // namespace

PageBlocks::Found PageBlocks::find_room(Search* search) {
  if (search->share_.account == 0) return find_place(search);
  const Found found = find_room_in_share(search);
  settle(*search, found);
  return found;
}

PageBlocks::Found PageBlocks::find_place(Search* search) {
  if (windows_[search->size_].cursor != kNone) {
    if (const Found found = advance(search); found != Found::kNoRoom) return found;
  }
  if (search->scanned_ != kNone) return scan_for_run(search);
  Found found = fit(search);
  if (found == Found::kNoRoom && close_sleeping_windows(sizes_.n_granules(search->size_)))
    found = fit(search);
  if (found != Found::kNoRoom) return found;
  if (search->reach_ == Search::Reach::kOwn) return make_room_among_own(search);
  return search->reach_ == Search::Reach::kGrowing ? make_room_to_grow(search) : make_room(search);
}

// Free room: a small rest as it is, a large one as a window.
PageBlocks::Found PageBlocks::fit(Search* search) {
  const uint32_t n = sizes_.n_granules(search->size_);
  const uint32_t block = space_.find(n);
  if (block == kNone) return Found::kNoRoom;
  const uint32_t length = space_.length_of(block);
  if (length / 2 < n) {
    space_.take(block, n);
    n_used_ += n;
    search->block = block;
    return Found::kBlock;
  }
  const uint32_t taken = std::min(window_length(*search), length / n * n);
  space_.take(block, taken);
  keep_for(block, search->size_);
  windows_[search->size_] = {block, block + taken};
  return advance(search);
}

// Room by eviction.
PageBlocks::Found PageBlocks::make_room(Search* search) {
  const uint32_t size = search->size_;
  uint32_t eldest = unheld_oldest();
  const uint32_t own = unheld_oldest_of_length(sizes_.n_granules(size));
  if (own != kNone && (eldest == kNone || sizes_.is_about_as_old(own, eldest)))
    return take_in_place(search, own);
  const uint32_t most = own == kNone ? kMostFirstWindows : kMostWindows;
  for (; search->n_windows_ < most && eldest != kNone; eldest = sizes_.oldest()) {
    const bool is_first = search->n_windows_++ == 0;
    if (open_window(*search, eldest)) {
      if (const Found found = advance(search); found != Found::kNoRoom) return found;
    } else if (own == kNone && is_first) {
      close_other_windows(size);  // a size that has nothing yet may break in where others are at work
    } else {
      break;
    }
  }
  if (own != kNone) return take_in_place(search, own);
  close_other_windows(size);
  begin_scan(search);
  return scan_for_run(search);
}

PageBlocks::Found PageBlocks::take_in_place(Search* search, uint32_t page) {
  goes_for(search, page);
  on_evict_(page);
  hide(page);
  has_hidden_ = true;
  ages_.remove(run_of(page), pages_[page].stamp);
  sizes_.leave(pages_[page].size);  // the page's use of it; the search's goes on as the new page's
  search->block = page;
  return Found::kBlock;
}

// What is held is in use, so it becomes young: the next search need not pass it again.
template <typename Oldest>
uint32_t PageBlocks::pass_held(Oldest oldest) {
  for (int passed = 0; passed < kMostPassed; ++passed) {
    const uint32_t page = oldest();
    if (page == kNone || !pages_[page].is_held()) return page;
    touch(page);
  }
  return kNone;
}

uint32_t PageBlocks::unheld_oldest(uint32_t size) {
  return pass_held([=, this] { return sizes_.oldest(size); });
}

// Whosever it is: a page takes the block of another that is as long.
uint32_t PageBlocks::unheld_oldest_of_length(uint32_t n_granules) {
  return pass_held([=, this] { return sizes_.oldest_of_length(n_granules); });
}

// It looks at those alone that are the account's or nobody's.
uint32_t PageBlocks::unheld_oldest_of_length(uint32_t n_granules, uint32_t account) {
  return pass_held([=, this] { return sizes_.oldest_of_length(n_granules, account); });
}

uint32_t PageBlocks::unheld_oldest_of_nobody() {
  return pass_held([this] { return sizes_.oldest_of_account(0); });
}

// The oldest of all sizes that nobody holds; one that is held if there are too many of them.
uint32_t PageBlocks::unheld_oldest() {
  uint32_t page = sizes_.oldest();
  for (int passed = 0; passed < kMostPassed && page != kNone && pages_[page].is_held(); ++passed) {
    touch(page);
    page = sizes_.oldest();
  }
  return page;
}

// --- windows

bool PageBlocks::is_stub_of(uint32_t block, uint32_t size) const {
  return pages_[block].state == PageState::kCleared && pages_[block].size == size;
}

void PageBlocks::keep_for(uint32_t block, uint32_t size) {
  pages_[block].state = PageState::kCleared;
  pages_[block].size = size;
}

// Whether a sweep for this search has to leave the block as it is.
bool PageBlocks::must_stay(uint32_t block, const Search& search) const {
  if (space_.is_free(block)) return false;
  const Page& page = pages_[block];
  if (page.state != PageState::kCommitted) return !is_stub_of(block, search.size_);
  return page.is_held() || is_spared(block, search);
}

void PageBlocks::evict(Search* search, uint32_t page) {
  goes_for(search, page);
  on_evict_(page);
  hide(page);
  has_hidden_ = true;
  ages_.remove(run_of(page), pages_[page].stamp);
  n_used_ -= space_.length_of(page);
  sizes_.leave(pages_[page].size);
  ++turn_.n_evicted;
}

// At least eight pages, so that windows are rare and what is left over between them is little; and two of the
// stretches whose ages are known.
uint32_t PageBlocks::window_length(const Search& search) const {
  const uint32_t n = sizes_.n_granules(search.size_);
  const uint64_t wanted = std::max(uint64_t{8} * n, uint64_t{2} * ages_.unit());
  const uint64_t of = std::min<uint64_t>(n_granules(), search.share_.n_granules);
  const uint64_t length = std::min<uint64_t>(wanted, of / kWindowShare);
  return static_cast<uint32_t>(std::max<uint64_t>(length / n, 1) * n);
}

void PageBlocks::close_window(uint32_t size) {
  const uint32_t stub = std::exchange(windows_[size].cursor, kNone);
  if (stub == kNone || stub >= n_granules() || !space_.starts_block(stub) || space_.is_free(stub)) return;
  if (!is_stub_of(stub, size)) return;
  pages_[stub].state = PageState::kNone;
  space_.release(stub);
}

void PageBlocks::close_other_windows(uint32_t size) {
  for (uint32_t other = 0; other < windows_.size(); ++other) {
    if (other != size) close_window(other);
  }
}

// Of sizes that nobody wanted for long, if what they keep is long enough. True if there was one.
bool PageBlocks::close_sleeping_windows(uint32_t n) {
  bool any = false;
  for (uint32_t size = 0; size < windows_.size(); ++size) {
    if (windows_[size].cursor == kNone) continue;
    if (sizes_.n_committed() - last_searches_[size] <= n_granules() / kSleepShare) continue;
    any = true;
    close_window(size);
  }
  return any && space_.find(n) != kNone;
}

// Opens a window where pages are oldest on average. False if there is no place for one.
bool PageBlocks::open_window(const Search& search, uint32_t eldest) {
  const uint32_t size = search.size_;
  const uint32_t n = sizes_.n_granules(size);
  const uint32_t length = window_length(search);
  ages_.open_all();
  for (const Window& window : windows_) {
    if (window.cursor < n_granules()) ages_.close(window.cursor, std::max(window.limit, window.cursor + 1));
  }
  const uint32_t first = ages_.oldest_stretch(length, pages_[eldest].stamp, sizes_.now(),
                                              sizes_.n_committed(), n_granules() / kWindowShare);
  if (first == kNone) return false;
  // The block around the beginning goes too if it is free or old; else it stays whole.
  uint32_t at = space_.around(first);
  const bool is_page = !space_.is_free(at) && pages_[at].state == PageState::kCommitted;
  const bool is_old = is_page && !pages_[at].is_held() && sizes_.is_about_as_old(at, eldest);
  if (at < first && !space_.is_free(at) && !is_old) at += space_.length_of(at);
  // Free room right before it would be too short for anybody.
  if (at < n_granules() && !space_.is_free(at)) {
    const uint32_t neighbour = space_.before(at);
    if (neighbour != kNone && space_.is_free(neighbour)) at = neighbour;
  }
  if (uint64_t{at} + n > n_granules()) return false;
  windows_[size] = {at, static_cast<uint32_t>(std::min<uint64_t>(n_granules(), uint64_t{at} + length))};
  return true;
}

// The window's next page. kNoRoom: the window was at its end, and is closed.
PageBlocks::Found PageBlocks::advance(Search* search) {
  const uint32_t size = search->size_;
  const uint32_t n = sizes_.n_granules(size);
  uint32_t at = kNone;
  if (const Found found = skip_to_room(search, &at); found != Found::kBlock) return found;
  if (!clear(search, at)) return Found::kAgain;
  Window& window = windows_[size];
  window.cursor = at + n;
  if (space_.length_of(at) > n) {
    space_.split(at, n);
    keep_for(window.cursor, size);
  }
  if (uint64_t{window.cursor} + n > window.limit) close_window(size);
  n_used_ += n;
  search->block = at;
  return Found::kBlock;
}

// Moves the window's cursor to where its next page can lie, jumping over what must stay: what lies before
// that is not evicted in vain. kBlock: that is at `*at`.
PageBlocks::Found PageBlocks::skip_to_room(Search* search, uint32_t* at) {
  const uint32_t size = search->size_;
  const uint32_t n = sizes_.n_granules(size);
  Window& window = windows_[size];
  if (window.cursor < n_granules() && !space_.starts_block(window.cursor)) {
    // Blocks were merged or cut there since: the cursor goes to where one begins.
    const uint32_t block = space_.around(window.cursor);
    window.cursor = space_.is_free(block) ? block : block + space_.length_of(block);
  }
  uint32_t end = window.cursor;
  while (end - window.cursor < n) {
    if (uint64_t{window.cursor} + n > window.limit) {
      close_window(size);
      return Found::kNoRoom;
    }
    ++turn_.n_looked;
    const uint32_t next = end + space_.length_of(end);
    if (must_stay(end, *search)) {
      const uint32_t limit = window.limit;
      close_window(size);  // what it kept is of no use to it any more
      window = {next, limit};
      if (turn_.n_looked > kMostLooked && uint64_t{next} + n <= limit) return Found::kAgain;
    }
    end = next;
  }
  *at = window.cursor;
  return Found::kBlock;
}

// Evicts what lies in the next page's room. False if it was enough for one turn: what was cleared is kept.
bool PageBlocks::clear(Search* search, uint32_t at) {
  const uint32_t size = search->size_;
  if (space_.is_free(at)) {
    space_.take(at, space_.length_of(at));
  } else if (pages_[at].state == PageState::kCommitted) {
    if (turn_.n_evicted == kMostEvicted) return false;
    evict(search, at);
  }
  keep_for(at, size);
  const uint32_t n = sizes_.n_granules(size);
  while (space_.length_of(at) < n) {
    const uint32_t next = at + space_.length_of(at);
    if (!space_.is_free(next)) {
      if (pages_[next].state == PageState::kCommitted) {
        if (turn_.n_evicted == kMostEvicted) return false;
        evict(search, next);
      }
      pages_[next].state = PageState::kNone;
    }
    space_.absorb(at);
  }
  return true;
}

// The last resort of a size that has no page to give up: the next run, wherever it lies, of which nothing
// must stay. It goes on where the size found the last one, so that the pages of a batch look through the pool
// once together and not once each.
void PageBlocks::begin_scan(Search* search) {
  const uint32_t end = scan_ends_[search->size_];
  search->scanned_ = search->run_ = search->scan_began_ = end < n_granules() ? space_.around(end) : 0;
  search->is_wrapped_ = false;
}

// Only when it has come around there is no room.
PageBlocks::Found PageBlocks::scan_for_run(Search* search) {
  const uint32_t size = search->size_;
  const uint32_t n = sizes_.n_granules(size);
  // Others were let in: the places may be inside of blocks now.
  for (uint32_t* place : {&search->scanned_, &search->run_}) {
    if (*place < n_granules()) *place = space_.around(*place);
  }
  for (;; ++turn_.n_looked) {
    if (search->scanned_ >= n_granules() && !search->is_wrapped_) {
      search->is_wrapped_ = true;
      search->scanned_ = search->run_ = 0;
    }
    // The run that it is in may reach across where it began, up to the end.
    const bool is_around = search->run_ >= search->scan_began_ || search->scanned_ >= n_granules();
    if (search->is_wrapped_ && is_around) return Found::kNoRoom;
    if (turn_.n_looked > kMostLooked) return Found::kAgain;
    const uint32_t block = search->scanned_;
    search->scanned_ += space_.length_of(block);
    if (must_stay(block, *search)) {
      search->run_ = search->scanned_;
    } else if (search->scanned_ - search->run_ >= n) {
      windows_[size] = {search->run_, search->run_ + n};
      scan_ends_[size] = search->run_ + n;
      // Others may have begun to hold something there since it was looked at.
      if (const Found found = advance(search); found != Found::kNoRoom) return found;
      search->run_ = search->scanned_;
    }
  }
}

}  // namespace p2pkv
