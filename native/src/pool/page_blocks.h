// Where the pool's pages lie: each takes exactly the granules it needs, and what must go for it is chosen
// here.
//
// Pages of one size take each other's blocks as they are, the one used longest ago first. When another size's
// pages are older, the size opens a *window* where pages are oldest on average, and sweeps it one own page
// after the other: what its next page needs is evicted, what is left over of the last victim is kept for the
// page after. docs/design.md, "Room for pages", says why this and not another way, and what becomes of pages
// of who has a share of the pool.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/exact_blocks.h"
#include "pool/age_map.h"
#include "pool/kept_records.h"
#include "pool/page_table.h"
#include "pool/size_queues.h"

namespace p2pkv {

// Not thread-safe: the pool's lock guards it. A block is named by its first granule.
//
// Invariants, of which the readers' proof is made (docs/design.md, "Generation words"):
//  - a word is even only at the first granule of a committed page. Words only grow, and no two pages of a
//    boot have the same generation, wherever they lie: the directory takes back by owner, boot and
//    generation;
//  - a word turns odd before anything else happens to its block, with a store fence before the block is
//    anybody's, and even after its last byte was copied in;
//  - a held page stays: its block is not swept, and if it is retracted not freed before the last hold goes;
//  - a reserved block is its owner's alone: it is not swept, merged or counted as free.
class PageBlocks {
 public:
  static constexpr uint32_t kNone = ExactBlocks::kNone;

  enum class Found : uint8_t {
    kBlock,   // the search has its block, reserved
    kAgain,   // enough was done under one hold of the lock: call once more, others may come in between
    kNoRoom,  // everything that could go for it is held or reserved; the search is over
  };

  // Whose a page is to be, and how many granules his pages may have together.
  struct Share {
    uint32_t account = 0;  // SizeQueues; 0: nobody's
    uint64_t n_granules = UINT64_MAX;
  };

  // A page's search for a block. What it found lies in `block`.
  class Search {
   public:
    uint32_t block = kNone;

    // Whether it was over because others' pages were not to go for it.
    bool is_confined() const { return reach_ == Reach::kOwn; }

   private:
    friend class PageBlocks;
    // Whose pages may go for it. Found out once, when it begins to look for a place: what it has taken out
    // would have gone in vain if they might not any more.
    enum class Reach : uint8_t {
      kAll,      // the oldest, whosever they are
      kGrowing,  // the same, though there are bytes enough: the account has never had so much
      kOwn,      // those of its account, and nobody's
    };

    Share share_;
    uint32_t size_ = 0;
    Reach reach_ = Reach::kAll;
    bool is_reach_known_ = false;
    bool has_cost_itself_ = false;  // a page of its account has gone for it
    bool has_cost_others_ = false;  // one of another account has, though there were bytes
    bool is_wrapped_ = false;       // the scan has gone on from the pool's beginning
    uint32_t n_passed_ = 0;         // pages of the account that were held
    uint32_t n_windows_ = 0;        // opened so far
    uint32_t scanned_ = kNone;      // once all else was in vain: the place up to which it looked for a run
    uint32_t scan_began_ = 0;       // where it began to
    uint32_t run_ = 0;              // where the run begins that it is in
  };

  // `words`: one a granule, all of them `first_word`, which is odd. `on_evict(page)` is called for each page
  // that goes to make room while it still is what it was; it may not call back.
  PageBlocks(PageTable& pages, uint8_t* words, uint32_t n_granules, uint64_t first_word,
             std::function<void(uint32_t)> on_evict);

  // Writes from now on what a successor has to know.
  void keep(KeptRecords* records) { kept_ = records; }
  // As PageTable says.
  void expect_filling() { space_.expect_filling(); }
  // Takes pages that a predecessor has left, by place, for committed, before anything else is done here. What
  // is known of them is in the table. Their words are even and stay so; all others are odd, and `first_word`
  // was above all of them.
  void adopt(const std::vector<KeptRecords::Left>& pages);
  // Forgets a page, whose word and bytes stay as they are: its block is nobody's in this process any more.
  void leave(uint32_t page);
  // Others know now that the page is, or is not, another node's.
  void keep_use(uint32_t page) {
    if (kept_ != nullptr) kept_->use(page, pages_[page].stamp, pages_[page].is_guest != 0);
  }

  // A search for `n_granules`, at most as many as there are. It ends with `reserve`, or with `give_up`. What
  // the account has is never more than its share, with what is searched for.
  Search search_for(uint32_t n_granules, const Share& share);
  Search search_for(uint32_t n_granules) { return search_for(n_granules, {}); }
  Found reserve(Search* search);
  void give_up(const Search& search);

  // A reserved block whose bytes are all there becomes a page.
  void commit(uint32_t block);
  // Frees a reserved block, or that of a retracted page which nobody holds any more.
  void drop(uint32_t block);
  // Takes a page out of sight; its block is freed if nobody holds it.
  void retract(uint32_t page);
  // Makes it the last of its size to go.
  void touch(uint32_t page);
  // Somebody has a lease on the page, nobody had; nobody has any more.
  void leased(uint32_t page);
  void unleased(uint32_t page);

  // The next page that begins at this granule or behind it, in the order of place; kNone if there is none.
  // `*at` is moved behind it, or as far as `most_steps` blocks or granules lead.
  uint32_t next_page(uint32_t* at, uint32_t most_steps) const;
  // Pages in the order in which they would go if all were in each other's way: oldest use first, of all
  // sizes. Stops where `take` answers false.
  void walk_oldest(const std::function<bool(uint32_t page)>& take) const;

  uint32_t n_granules() const { return space_.n_granules(); }
  // Granules of reserved blocks, pages, and what is held of retracted ones.
  uint32_t n_used() const { return n_used_; }
  uint32_t length_of(uint32_t block) const { return space_.length_of(block); }
  // Granules of all blocks of an account's, and of those that are searched for.
  uint64_t n_charged(uint32_t account) const { return sizes_.n_charged(account); }
  // Pages that went for others of their own account, which was at its share; only grows.
  uint64_t n_gone_for_shares() const { return n_gone_for_shares_; }
  // Pages of others that went for an account that grew, though there were bytes enough; only grows.
  uint64_t n_gone_for_growth() const { return n_gone_for_growth_; }

 private:
  // Where a size puts its next page, and where its window ends. A hint: the blocks there may have changed.
  struct Window {
    uint32_t cursor = kNone;  // kNone: there is no window
    uint32_t limit = 0;
  };
  // A turn is done under one hold of the lock. Either of these bounds costs about 50 us of cache misses, on a
  // busy machine.
  static constexpr uint32_t kMostLooked = 512;
  static constexpr uint32_t kMostEvicted = 64;
  struct Turn {
    uint32_t n_looked = 0;
    uint32_t n_evicted = 0;
  };
  // It says what is known of an account besides its charge, in granules.
  struct Account {
    uint64_t n_vacant = 0;   // that its pages had which went for its own ones, and nothing has filled since
    uint64_t n_in_vain = 0;  // of pages that had no place, or that of an own one, since one had another
  };

  Found find_room(Search* search);
  Found find_room_in_share(Search* search);
  Found find_place(Search* search);
  Found fit(Search* search);
  Found make_room(Search* search);
  Found keep_to_share(Search* search);
  Found oldest_of_account(Search* search, uint32_t* page);
  Found make_room_to_grow(Search* search);
  Found make_room_among_own(Search* search);
  void open_window_at(Search* search, uint32_t page);
  Search::Reach reach_of(const Search& search) const;
  bool is_spared(uint32_t page, const Search& search) const;
  void settle(const Search& search, Found found);
  Found take_in_place(Search* search, uint32_t page);
  uint32_t unheld_oldest(uint32_t size);
  uint32_t unheld_oldest_of_length(uint32_t n_granules);
  uint32_t unheld_oldest_of_length(uint32_t n_granules, uint32_t account);
  uint32_t unheld_oldest_of_nobody();
  uint32_t unheld_oldest();
  template <typename Oldest>
  uint32_t pass_held(Oldest oldest);

  Found advance(Search* search);
  Found skip_to_room(Search* search, uint32_t* at);
  bool clear(Search* search, uint32_t at);
  bool open_window(const Search& search, uint32_t eldest);
  void close_window(uint32_t size);
  void close_other_windows(uint32_t size);
  bool close_sleeping_windows(uint32_t n_granules);
  uint32_t window_length(const Search& search) const;
  void begin_scan(Search* search);
  Found scan_for_run(Search* search);

  bool is_stub_of(uint32_t block, uint32_t size) const;
  bool must_stay(uint32_t block, const Search& search) const;
  void keep_for(uint32_t block, uint32_t size);
  void evict(Search* search, uint32_t page);
  void goes_for(Search* search, uint32_t page);
  void hide(uint32_t page);
  void require_own(uint32_t block, uint32_t n_granules) const;
  AgeMap::Run run_of(uint32_t block) const { return {block, space_.length_of(block)}; }
  uint8_t* word_at(uint32_t granule) const { return words_ + uint64_t{granule} * sizeof(uint64_t); }

  PageTable& pages_;
  uint8_t* const words_;
  const std::function<void(uint32_t)> on_evict_;
  KeptRecords* kept_ = nullptr;
  ExactBlocks space_;
  SizeQueues sizes_;
  AgeMap ages_;
  std::vector<Window> windows_;          // by size
  std::vector<uint64_t> last_searches_;  // by size: what had been committed when it last wanted a block
  std::vector<uint32_t> scan_ends_;      // by size: where it last found a run, once all else was in vain
  uint64_t last_generation_;             // even; no word is above it by more than one
  uint32_t n_used_ = 0;
  uint64_t n_gone_for_shares_ = 0;
  uint64_t n_gone_for_growth_ = 0;
  std::array<Account, SizeQueues::kMostAccounts + 1> accounts_{};
  Turn turn_;
  bool has_hidden_ = false;  // words turned odd in this turn, and no fence yet
};

}  // namespace p2pkv
