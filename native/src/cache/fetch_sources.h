// Where a fetch looks before anybody is asked: what a warm call finds is found here, in one go.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/timings.h"
#include "cache/fetch_batch.h"
#include "cache/hedges.h"
#include "cache/hot_pages.h"
#include "cache/location_cache.h"
#include "cache/touches.h"
#include "directory/other_holders.h"
#include "directory/shard.h"
#include "disk/tier.h"
#include "page/page_history.h"
#include "peers/peer_connections.h"
#include "pool/pool.h"

namespace p2pkv {

// Thread-safe, as its parts are; they must outlive it.
class FetchSources {
 public:
  // What calls are watched with.
  struct Watched {
    std::shared_ptr<Timings> fetches;  // whole fetches, by `FetchBatch::Farthest`
    std::shared_ptr<Timings> reads;    // by source, as `fetched` counts them
    std::shared_ptr<PageHistory> history;
  };
  struct Checks {
    uint64_t rejected;      // reads whose page was another by then
    uint64_t checksum;      // reads with other bytes than were published
    uint64_t late_calls;    // fetches that missed pages because their time was over
    uint64_t hosts_guests;  // pages that lay in the pool of the host's node as other nodes' pages
  };

  struct Parts {
    Pool& pool;
    Tier* tier;  // null: this node has no disk
    LocationCache& locations;
    Shard& shard;
    PeerConnections& peers;
    uint64_t own_key;
    bool check_sums;
    Watched watched;
    std::shared_ptr<OtherHolders> others;        // null: pages are read from the first holder that is named
    std::shared_ptr<Touches> touches;            // null: owners are not told what is read from them
    std::shared_ptr<CurrentMappedPool> of_host;  // null: this is no engine that is attached
  };
  // How a round of reads may end.
  struct Round {
    bool is_elsewhere_good = true;  // else pages are read from where they are located only
    bool may_look_again = true;     // a look-up and another round may follow
    bool is_use = true;             // of the pages, by a caller: their owners are told
  };
  struct Found {
    bool lengths_agree = true;  // of the pages in the own pool with the memory given for them
    bool has_read = false;      // from peers
  };

  explicit FetchSources(const Parts& parts) : parts_(parts), fetched_(kFirstWay + parts.peers.n_ways()) {}

  // How many sources there are: what `reads` has labels for.
  static size_t n_sources(const PeerConnections& peers) { return kFirstWay + peers.n_ways(); }

  // Takes what the own pool, that of the host's node and the own disk have, and reads the rest from its
  // owners if the location cache knows where all of it lies and all of it can be read at once. What is left
  // is for others to look up.
  Found gather(FetchBatch& batch, const std::vector<LocalMemory>& memories, const Deadline& deadline,
               const Deadline& disk_deadline);
  // Has the batch's taker take what is known to lie in memory that this process maps: in the own pool, and in
  // those of peers whose pages the location cache has. Nobody is asked, and nothing counts as missed: the
  // rest is for another batch.
  void gather_taken(FetchBatch& batch, const std::vector<LocalMemory>& memories, const Deadline& deadline);
  // Reads what is located from its owners.
  void read(FetchBatch& batch, const std::vector<LocalMemory>& memories, const Deadline& deadline,
            const Round& round);

  // Ends a fetch for which `gather` was not enough: counts and remembers what it has missed, and why.
  // `has_promoted`: peers were asked to bring pages back from their disks.
  std::array<uint64_t, FetchBatch::kMissKinds> finish(FetchBatch& batch, bool has_promoted);

  // Returns what was fetched so far, by source: 0 is the own pool, 1 the own disk, and from 2 on are the
  // transports by number.
  std::vector<FetchBatch::Taken> fetched() const;
  // Returns how many pages the location cache knew.
  Checks checks() const { return {n_rejected_, n_bad_sums_, n_late_calls_, n_hosts_guests_}; }
  std::array<uint64_t, Hedges::kWhys> hedges() const { return hedges_.counts(); }
  // Returns the pages that calls found most often lately, wherever they came from.
  std::vector<HotPages::Hot> hot_pages(size_t most) { return hot_.list(most); }
  uint64_t n_located() const { return n_located_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kOwnPool = 0, kOwnDisk = 1, kFirstWay = 2;
  struct Count {
    std::atomic<uint64_t> n_pages{0};
    std::atomic<uint64_t> nbytes{0};
  };

  void count(size_t source, const FetchBatch::Taken& taken);
  void took_own(FetchBatch& batch, const FetchBatch::Taken& own, const Stopwatch& copying);
  void gather_from_host(FetchBatch& batch, const Deadline& deadline);
  // Has pages read from other holders; returns who is to be connected to for that by the next call.
  std::vector<PeerId> spread(FetchBatch& batch, HolderChoice& choice);
  void ended(const FetchBatch& batch);

  const Parts parts_;
  std::vector<Count> fetched_;
  Hedges hedges_;
  HotPages hot_;
  std::atomic<uint64_t> n_spread_{0};  // rounds whose pages were spread over their holders so far
  std::atomic<uint64_t> n_located_{0};
  std::atomic<uint64_t> n_rejected_{0};
  std::atomic<uint64_t> n_bad_sums_{0};
  std::atomic<uint64_t> n_late_calls_{0};
  std::atomic<uint64_t> n_hosts_guests_{0};
};

}  // namespace p2pkv
