// How a page of who has a share of the pool finds its block: what must go for it is of his own.
//
// Where there are too few bytes left for it, and so for the shares of all, the oldest go, whosever they are.
// Where there are enough, but in pieces that are too short, others' go only while he grows into his share;
// later his own go that are in the way, or there is no room.
#include <algorithm>
#include <array>
#include <utility>

#include "pool/page_blocks.h"

namespace p2pkv {
namespace {

// Pages of an account that a search passes because they are held: beyond it there is no room. They are young
// then, so that those behind them are found by the next one. A guess: a tenth of a millisecond in 8 turns.
constexpr uint32_t kMostHeld = 4096;

}  // namespace

PageBlocks::Found PageBlocks::find_room_in_share(Search* search) {
  const Share& share = search->share_;
  if (const Found found = keep_to_share(search); found != Found::kNoRoom) return found;
  if (sizes_.n_charged(share.account) > share.n_granules) {
    search->reach_ = Search::Reach::kOwn;  // none of its own may go for it
    return Found::kNoRoom;
  }
  if (!std::exchange(search->is_reach_known_, true)) search->reach_ = reach_of(*search);
  const Found found = find_place(search);
  if (found != Found::kNoRoom || search->reach_ != Search::Reach::kOwn) return found;
  search->reach_ = reach_of(*search);  // others were let in: they may have used the bytes that were left
  if (search->reach_ == Search::Reach::kOwn) return Found::kNoRoom;
  search->scanned_ = kNone;  // what it has looked at may go now
  search->n_windows_ = 0;
  return Found::kAgain;
}

// An account grows while it has, and has had, less than its share: what it has, with what is searched for,
// and what it has vacated for its own pages are no more together. So no more than a share's worth of its
// pages ever has others' go where there are bytes, however its own come and go. What others take of it, or
// what is taken back, it may grow by again.
PageBlocks::Search::Reach PageBlocks::reach_of(const Search& search) const {
  const auto& [account, limit] = search.share_;
  if (n_granules() - n_used_ < sizes_.n_granules(search.size_)) return Search::Reach::kAll;
  const uint64_t n_had = sizes_.n_charged(account) + accounts_[account].n_vacant;
  return n_had <= limit ? Search::Reach::kGrowing : Search::Reach::kOwn;
}

// Whether it must stay for whose it is. What nobody is charged for goes if it is the oldest: not if it was
// used after what the search could have in its place.
bool PageBlocks::is_spared(uint32_t page, const Search& search) const {
  if (search.reach_ != Search::Reach::kOwn) return false;
  const uint32_t account = sizes_.account_of(pages_[page].size);
  if (account == search.share_.account) return false;
  if (account != 0) return true;
  const uint32_t own = sizes_.oldest(search.size_);
  return own != kNone && pages_[page].stamp > pages_[own].stamp;
}

// Counts what it costs whom.
void PageBlocks::goes_for(Search* search, uint32_t page) {
  const auto& [account, limit] = search->share_;
  if (account == 0) return;
  const uint32_t of = sizes_.account_of(pages_[page].size);
  if (of == account) {
    if (sizes_.n_charged(account) > limit) ++n_gone_for_shares_;
    accounts_[account].n_vacant += space_.length_of(page);
    search->has_cost_itself_ = true;
  } else if (of != 0 && search->reach_ == Search::Reach::kGrowing) {
    search->has_cost_others_ = true;
    ++n_gone_for_growth_;
  }
}

// A page that had others' go is growth, and fills nothing that was vacated. An account that is refused as
// much as its share in a row begins anew, or it might have nothing for good: so does one that has less than
// half of its share, and gives up own pages for all that it stores.
void PageBlocks::settle(const Search& search, Found found) {
  if (found == Found::kAgain) return;
  const auto& [number, limit] = search.share_;
  Account& account = accounts_[number];
  const uint64_t n = sizes_.n_granules(search.size_);
  const bool is_block = found == Found::kBlock;
  if (is_block && !search.has_cost_others_) account.n_vacant -= std::min(account.n_vacant, n);
  const bool is_in_vain = !is_block || (search.has_cost_itself_ && sizes_.n_charged(number) <= limit / 2);
  account.n_in_vain = is_in_vain && search.is_confined() ? account.n_in_vain + n : 0;
  if (account.n_in_vain >= limit) account = {};
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
    evict(search, eldest);
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

// As everybody finds it, once there is no free room left that another size's window keeps.
PageBlocks::Found PageBlocks::make_room_to_grow(Search* search) {
  if (search->n_windows_ > 0) return make_room(search);
  close_other_windows(search->size_);
  const Found found = fit(search);
  return found == Found::kNoRoom ? make_room(search) : found;
}

// Room by eviction of own pages and of nobody's, the oldest first.
PageBlocks::Found PageBlocks::make_room_among_own(Search* search) {
  const uint32_t size = search->size_;
  const uint32_t account = search->share_.account;
  uint32_t eldest = kNone;
  if (const Found found = oldest_of_account(search, &eldest); found != Found::kBlock) {
    if (found == Found::kAgain) return found;
    eldest = kNone;
  }
  uint32_t other = unheld_oldest_of_nobody();
  if (eldest == kNone || (other != kNone && pages_[other].stamp < pages_[eldest].stamp))
    std::swap(eldest, other);
  const uint32_t place = unheld_oldest_of_length(sizes_.n_granules(size), account);
  if (place != kNone && (eldest == kNone || sizes_.is_about_as_old(place, eldest)))
    return take_in_place(search, place);
  // What was stored at one time lies together: where the oldest is, there are more.
  const std::array<uint32_t, 2> oldest = {eldest, other};
  while (search->n_windows_ < oldest.size()) {
    const uint32_t page = oldest[search->n_windows_++];
    if (page == kNone) continue;
    open_window_at(search, page);
    if (const Found found = advance(search); found != Found::kNoRoom) return found;
  }
  if (place != kNone) return take_in_place(search, place);
  close_other_windows(size);
  if (const Found found = fit(search); found != Found::kNoRoom) return found;
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
