// A pool whose pages are of whole granules, and engines that have shares of it.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "attach/engine_shares.h"
#include "pool_calls.h"

namespace {

using p2pkv::Deadline;
using p2pkv::PoolShare;
using p2pkv::attaching::EngineShares;

// A pool, and engines that may have `share` granules of it each.
struct Shared {
  Shared(uint64_t n_granules, uint64_t share)
      : pool(make_pool(n_granules)), shares(*pool, share * kGranule) {}

  struct Outcome {
    std::vector<PoolStatus> statuses;
    std::vector<Location> locations;
    size_t count(PoolStatus status) const {
      return static_cast<size_t>(std::count(statuses.begin(), statuses.end(), status));
    }
  };

  PoolShare open(uint64_t mark = 0) { return shares.open(mark); }
  Outcome publish(const PoolShare& share, const std::vector<uint64_t>& names, size_t nbytes = kGranule) {
    const Bytes bytes = bytes_of(1, nbytes);
    std::vector<Key> keys;
    for (const uint64_t name : names) keys.push_back(key_of(name));
    const std::vector<Piece> pieces(names.size(), piece_of(bytes));
    Outcome outcome{std::vector<PoolStatus>(names.size()), std::vector<Location>(names.size())};
    pool->publish({names.size(), 1, keys.data(), pieces.data()}, outcome.statuses.data(),
                  outcome.locations.data(), Deadline::after(30), nullptr, share);
    return outcome;
  }
  uint64_t charged(const PoolShare& share) { return pool->charged_nbytes(share.account) / kGranule; }
  // Pages of others that went for an engine that grew.
  uint64_t n_outgrown() { return pool->share_stats().outgrown_pages; }
  uint64_t n_evicted() { return pool->share_stats().evicted_pages; }
  void touch(uint64_t name) {
    const Key key = key_of(name);
    CHECK_EQ(pool->touch(&key, 1), 1U);
  }
  size_t count(uint64_t first, uint64_t end) {
    size_t n = 0;
    for (uint64_t name = first; name < end; ++name) n += contains(*pool, name) ? 1 : 0;
    return n;
  }

  std::shared_ptr<Pool> pool;
  EngineShares shares;
};

[[maybe_unused]] std::vector<uint64_t> names(uint64_t first, uint64_t end) {
  std::vector<uint64_t> all;
  for (uint64_t name = first; name < end; ++name) all.push_back(name);
  return all;
}

}  // namespace
