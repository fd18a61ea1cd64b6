// Where a fetch looks before anybody is asked: what a warm call finds is found here, in one go.
#pragma once

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
struct FetchSources {
  Pool& pool;
  Tier* tier;  // null: this node has no disk
  LocationCache& locations;
  Shard& shard;
  PeerConnections& peers;
  uint64_t own_key;
  bool check_sums;

  struct Found {
    bool lengths_agree = true;  // of the pages in the own pool with the memory given for them
    FetchBatch::Taken own;
    FetchBatch::Taken disk;
    size_t n_located = 0;                 // by the location cache
    bool has_read = false;                // from peers
    std::vector<FetchBatch::Taken> read;  // by the number of the transport
  };

  // Takes what the own pool and the own disk have, and reads the rest from its owners if the location cache
  // knows where all of it lies and all of it can be read at once. What is left is for others to look up.
  Found gather(FetchBatch& batch, const std::vector<LocalMemory>& memories, const Deadline& deadline,
               const Deadline& disk_deadline) const;
  // Reads what is located from its owners; what came and was right, by the number of the transport.
  std::vector<FetchBatch::Taken> read(FetchBatch& batch, const std::vector<LocalMemory>& memories,
                                      const Deadline& deadline) const;
};

}  // namespace p2pkv
