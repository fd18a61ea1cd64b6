// Where a fetch looks before anybody is asked: what a warm call finds is found here, in one go.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "cache/fetch_batch.h"
#include "cache/location_cache.h"
#include "directory/shard.h"
#include "disk/tier.h"
#include "peers/peer_connections.h"
#include "pool/pool.h"

namespace p2pkv {

// Thread-safe, as its parts are; they must outlive it.
class FetchSources {
 public:
  struct Parts {
    Pool& pool;
    Tier* tier;  // null: this node has no disk
    LocationCache& locations;
    Shard& shard;
    PeerConnections& peers;
    uint64_t own_key;
    bool check_sums;
  };
  struct Found {
    bool lengths_agree = true;  // of the pages in the own pool with the memory given for them
    bool has_read = false;      // from peers
  };

  explicit FetchSources(const Parts& parts) : parts_(parts), fetched_(kFirstWay + parts.peers.n_ways()) {}

  // Takes what the own pool and the own disk have, and reads the rest from its owners if the location cache
  // knows where all of it lies and all of it can be read at once. What is left is for others to look up.
  Found gather(FetchBatch& batch, const std::vector<LocalMemory>& memories, const Deadline& deadline,
               const Deadline& disk_deadline);
  // Reads what is located from its owners.
  void read(FetchBatch& batch, const std::vector<LocalMemory>& memories, const Deadline& deadline);

  // Returns what was fetched so far, by source: 0 is the own pool, 1 the own disk, and from 2 on are the
  // transports by number.
  std::vector<FetchBatch::Taken> fetched() const;
  // Returns how many pages the location cache knew.
  uint64_t n_located() const { return n_located_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kOwnPool = 0, kOwnDisk = 1, kFirstWay = 2;
  struct Count {
    std::atomic<uint64_t> n_pages{0};
    std::atomic<uint64_t> nbytes{0};
  };

  void count(size_t source, const FetchBatch::Taken& taken);

  const Parts parts_;
  std::vector<Count> fetched_;
  std::atomic<uint64_t> n_located_{0};
};

}  // namespace p2pkv
