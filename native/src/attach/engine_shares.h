// How much of the pool each engine's pages may have: who publishes without end takes out its own first. It
// counts bytes: where blocks differ in size, the pool may still have to make room among others' pages.
//
// An engine is charged for what it stored, whoever reads it: for a page that two publish, the one is whose
// copy was first. Its oldest pages go first, but those that were used since have a second chance. When it
// ends, its account stays with its pages, and the next engine that attaches goes on with it: so there are
// never more accounts than engines were attached at once, however often one is started.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "pool/pool.h"

namespace p2pkv::attaching {

// Thread-safe.
//
// Invariant: what an engine has in the pool, and what its publishes under way may add, is at most its share,
// but for pages that others hold, and for those that came to be missing while a publish was under way.
class EngineShares {
 public:
  class Account;

  // It says what a publish may do.
  struct Admitted {
    size_t n_pages;   // of its front may be published
    uint64_t nbytes;  // that it may add to the pool; to be settled
  };

  // `share`: bytes of the pool for each engine. The pool outlives this.
  EngineShares(Pool& pool, uint64_t share) : pool_(pool), share_(share) {}

  // An account for an engine that has come: that of the engine that has left last, if nobody has it yet. It
  // stays for as long as this.
  Account& open();
  // The engine has gone. What its requests under way store yet is still charged to the account.
  void leave(Account& account);

  // Makes room for what of the batch is not in the pool, taking out pages of this account alone. Pages behind
  // the front that fits the share are not to be published, as if the pool had no room for them.
  Admitted admit(Account& account, const PageBatch& batch);
  // Charges what was stored of the batch's front.
  void settle(Account& account, const Admitted& admitted, const Key* keys, const PoolStatus* statuses,
              const Location* locations);

  uint64_t share() const { return share_; }
  // Bytes that are charged to the account which has most.
  uint64_t largest_charge();
  // Pages that were taken out for being above a share; only grows.
  uint64_t n_taken_out() const { return n_taken_out_; }
  // How many pages are remembered.
  size_t n_charges();

 private:
  uint64_t block_nbytes(uint64_t stored) const;
  void make_room(Account& account);
  void review_oldest(Account& account, size_t n, TakeOut which);
  void forget_gone(size_t most);

  Pool& pool_;
  const uint64_t share_;
  std::atomic<uint64_t> n_taken_out_{0};

  std::mutex mutex_;  // guards what follows; taken before the pool's
  std::deque<Account> accounts_;
  std::vector<Account*> left_;  // by engines that have gone, the last one at the end
  uint64_t charged_ = 0;        // to all of them
  size_t hand_ = 0;             // the account that is looked through next for what has gone
  // Both of the call under way. What a batch has that is there already is not to go for the rest of it.
  std::vector<StoredPage> reviewed_;
  std::unordered_set<Key, KeyHash> spared_;
};

// Pages, from the one that was stored, or found to be used, longest ago.
class EngineShares::Account {
 private:
  friend class EngineShares;
  std::deque<StoredPage> pages_;
  uint64_t charged_ = 0;    // bytes of these
  uint64_t in_flight_ = 0;  // that publishes under way may add
};

}  // namespace p2pkv::attaching
