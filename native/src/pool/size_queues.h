// The pool's pages by size: those whose blocks are equally long have an order of last use of their own.
//
// Pages of one size can take each other's blocks as they are, so most evictions are a step in one of these
// orders; the stamps, which all sizes share, say which size has the oldest. Pages of one *account*, those
// that somebody with a share of the pool has stored, have sizes of their own: so it is known at any time how
// much that is, and which of them is the oldest.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pool/page_table.h"

namespace p2pkv {

// Not thread-safe. The records are the page table's; their `newer`, `older`, `stamp` and `size` are kept
// here.
//
// A stamp is what was committed before, in ticks of a 65,536th of the pool or less: so a page's age is what
// would have to be published to make another as old.
class SizeQueues {
 public:
  static constexpr uint32_t kNone = PageTable::kNone;
  // Sizes that are kept exactly. With more of them, each has so few pages that rounding wastes less than the
  // room between them would: further ones are rounded up to one of sixteen an octave.
  static constexpr size_t kMostExact = 64;
  // Accounts are numbered from 1 on; 0 is nobody's.
  static constexpr uint32_t kMostAccounts = 64;

  SizeQueues(PageTable& pages, uint32_t n_granules);

  // The size of blocks for pages of `n_granules`, which stays until `leave` was called as often.
  uint32_t enter(uint32_t n_granules, uint32_t account = 0);
  // Enters a size of exactly these many, however many sizes there are, of nobody.
  uint32_t enter_exactly(uint32_t n_granules);
  void leave(uint32_t size);
  uint32_t n_granules(uint32_t size) const { return sizes_[size].n_granules; }
  uint32_t account_of(uint32_t size) const { return sizes_[size].account; }
  // Granules of the blocks of an account, and of those that are searched for it.
  uint64_t n_charged(uint32_t account) const { return n_charged_[account]; }
  uint32_t n_sizes() const { return static_cast<uint32_t>(sizes_.size()); }

  // A committed page, whose `size` is set, as the one used last.
  void link(uint32_t page);
  // Links a page that was used at `stamp`: no page of its size was used later, and `now` is not before that.
  void link_used_at(uint32_t page, uint64_t stamp);
  void unlink(uint32_t page);

  uint32_t oldest(uint32_t size) const { return sizes_[size].oldest; }
  // Of all sizes.
  uint32_t oldest() const;
  // Of all sizes of the account.
  uint32_t oldest_of_account(uint32_t account) const;
  // These look at all blocks of so many granules, and the second one at those alone that are the account's or
  // nobody's.
  uint32_t oldest_of_length(uint32_t n_granules) const;
  uint32_t oldest_of_length(uint32_t n_granules, uint32_t account) const;
  // Whether the page is about as old as another, which is the oldest or nearly so. Then it goes in its place.
  bool is_about_as_old(uint32_t page, uint32_t eldest) const;

  // Granules committed so far.
  uint64_t n_committed() const { return n_committed_; }
  void committed(uint32_t n_granules) { n_committed_ += n_granules; }
  uint64_t now() const { return n_committed_ >> tick_bits_; }
  // Goes on from when that was `now`, which is below 2^48.
  void go_on_from(uint64_t now) { n_committed_ = now << tick_bits_; }

 private:
  struct Size {
    uint32_t n_granules = 0;
    uint32_t account = 0;
    uint32_t oldest = kNone;
    uint32_t newest = kNone;
    uint32_t n_users = 0;  // blocks of this size, and searches for one; 0: the place may be another size's
    uint64_t oldest_stamp = UINT64_MAX;  // here, so that looking for the oldest of all touches no page
  };

  template <typename Counts>
  uint32_t oldest_where(Counts counts) const;
  uint32_t find(uint32_t n_granules, uint32_t account) const;
  uint32_t rounded_up(uint32_t n_granules, uint32_t account) const;
  uint32_t use(uint32_t size, uint32_t n_granules, uint32_t account);
  void oldest_changed(Size& size);

  PageTable& pages_;
  const uint32_t n_granules_;
  const uint32_t tick_bits_;
  uint64_t n_committed_ = 0;
  std::vector<Size> sizes_;
  std::array<uint64_t, kMostAccounts + 1> n_charged_{};
  uint32_t last_entered_ = 0;
};

}  // namespace p2pkv
