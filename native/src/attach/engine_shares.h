// Whose account in the pool an engine's pages are charged to: who publishes without end takes out his own
// pages first, and the pool sees to that (pool/page_blocks_shares.cc).
//
// An engine is charged for what it stored, whoever reads it: for a page that two publish, the one is whose
// copy was first. When it ends, its account stays with its pages, and an engine that attaches goes on with
// it: so there are never more accounts than engines were attached at once, however often one is started.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "pool/pool.h"

namespace p2pkv::attaching {

// Thread-safe.
class EngineShares {
 public:
  // `share`: bytes of the pool for each engine. The pool outlives this.
  EngineShares(Pool& pool, uint64_t share) : pool_(pool), share_(share) {}

  // An account for an engine that has come. `mark` is what it calls itself, life after life; 0: nothing. It
  // has the one that it left, unless another has come and has it; who left none has that of one without a
  // mark, or else the one that was left longest ago.
  PoolShare open(uint64_t mark);
  // The engine has gone. What its requests under way store yet is still charged to the account.
  void leave(const PoolShare& share);

  uint64_t share() const { return share_; }
  // Bytes that are charged to the account which has most.
  uint64_t largest_charge();

 private:
  struct Left {
    uint32_t account;
    uint64_t mark;
  };

  Pool& pool_;
  const uint64_t share_;

  std::mutex mutex_;             // guards what follows
  std::vector<uint64_t> marks_;  // of who has, or had, each account; they are numbered from 1 on
  std::vector<Left> left_;       // accounts of engines that have gone, the last one at the end
};

}  // namespace p2pkv::attaching
