// How a page of who has a share of the pool finds its block: what must go for it is of his own.
//
// Others' pages go for it only where there are too few bytes left for it, and so for the shares of all: then
// the oldest go, whosever they are. Where there are enough, but in pieces that are too short, his own pages
// go that are in the way, or there is no room.
#include <algorithm>

#include "pool/page_blocks.h"

namespace p2pkv {
namespace {

// Windows that one search opens.
constexpr uint32_t kMostOwnWindows = 2;
// Pages of an account that a search passes because they are held: beyond it there is no room. They are young
// then, so that those behind them are found by the next one. A guess: a tenth of a millisecond in 8 turns.
constexpr uint32_t kMostHeld = 4096;

}  // namespace

void PageBlocks::confine(Search* search) {
  const Share& share = search->share_;
  const bool is_above = sizes_.n_charged(share.account) > share.n_granules;
  const bool has_bytes = n_granules() - n_used_ >= sizes_.n_granules(search->size_);
  const bool is_confined = is_above || (has_bytes && !search->is_let_out_);
  if (is_confined == search->is_confined_) return;
  search->is_confined_ = is_confined;
  search->scanned_ = kNone;  // what it has looked at may go now, or may not any more
  search->n_windows_ = 0;
}

bool PageBlocks::is_anothers(uint32_t page, const Search& search) const {
  if (!search.is_confined_) return false;
  const uint32_t account = sizes_.account_of(pages_[page].size);
  return account != 0 && account != search.share_.account;
}

// Counts it, if it goes because its own account is above its share.
void PageBlocks::goes_for(const Search& search, uint32_t page) {
  const auto& [account, limit] = search.share_;
  if (account != 0 && sizes_.n_charged(account) > limit && sizes_.account_of(pages_[page].size) == account)
    ++n_gone_for_shares_;
}

// Takes out pages of the account until it is within its share, with what is searched for. kNoRoom: none has
// to go any more, or none may. kBlock: one has left its place to the search.
PageBlocks::Found PageBlocks::keep_to_share(Search* search) {
  const auto& [account, limit] = search->share_;
  const uint32_t n = sizes_.n_granules(search->size_);
  if (n > limit) return Found::kNoRoom;  // nothing goes for what is not stored anyway
  while (sizes_.n_charged(account) > limit) {
    uint32_t eldest = kNone;
    if (const Found found = oldest_of_account(search, &eldest); found != Found::kBlock) return found;
    const bool is_enough = sizes_.n_charged(account) - n <= limit;
    const uint32_t own = is_enough ? unheld_oldest(search->size_) : kNone;
    if (own != kNone && sizes_.is_about_as_old(own, eldest)) return take_in_place(search, own);
    if (turn_.n_evicted == kMostEvicted) return Found::kAgain;
    evict(*search, eldest);
    pages_[eldest].state = PageState::kNone;
    space_.release(eldest);
  }
  return Found::kNoRoom;
}

// kBlock: it is `*page`. What is held is in use, so it becomes young.
PageBlocks::Found PageBlocks::oldest_of_account(Search* search, uint32_t* page) {
  for (;;) {
    *page = sizes_.oldest_of_account(search->share_.account);
    if (*page == kNone || search->n_passed_ == kMostHeld) return Found::kNoRoom;
    if (!pages_[*page].is_held()) return Found::kBlock;
    if (turn_.n_looked++ == kMostLooked) return Found::kAgain;
    touch(*page);
    ++search->n_passed_;
  }
}

// Room by eviction of own pages, and of nobody's that lie between them.
PageBlocks::Found PageBlocks::make_room_among_own(Search* search) {
  const uint32_t size = search->size_;
  const uint32_t own = unheld_oldest(size);
  uint32_t eldest = kNone;
  Found found = oldest_of_account(search, &eldest);
  if (found == Found::kAgain) return found;
  const bool is_any = found == Found::kBlock;
  if (is_any && own != kNone && sizes_.is_about_as_old(own, eldest)) return take_in_place(search, own);
  // What was stored at one time lies together: where the oldest is, there are more.
  while (is_any && eldest != kNone && search->n_windows_++ < kMostOwnWindows) {
    open_window_at(search, eldest);
    if (found = advance(search); found != Found::kNoRoom) return found;
    eldest = sizes_.oldest_of_account(search->share_.account);
  }
  if (own != kNone) return take_in_place(search, own);
  close_other_windows(size);
  if (found = fit(search); found != Found::kNoRoom) return found;
  begin_scan(search);
  return scan_for_run(search);
}

void PageBlocks::open_window_at(Search* search, uint32_t page) {
  const uint32_t neighbour = space_.before(page);
  const uint32_t at = neighbour != kNone && space_.is_free(neighbour) ? neighbour : page;
  const uint64_t length =
      std::max(uint64_t{8} * sizes_.n_granules(search->size_), uint64_t{window_length(*search)});
  const uint64_t limit = at + length;
  windows_[search->size_] = {at, static_cast<uint32_t>(std::min<uint64_t>(n_granules(), limit))};
}

}  // namespace p2pkv
