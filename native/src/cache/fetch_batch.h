// The pages of one fetch, from their keys to their outcomes: everything that is done per page between the
// calls in which Python decides whom to ask and whom to read from.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "base/timings.h"
#include "cache/holder_choice.h"
#include "cache/holder_spread.h"
#include "cache/location_cache.h"
#include "cache/touches.h"
#include "directory/shard.h"
#include "disk/tier.h"
#include "page/location.h"
#include "page/page_taker.h"
#include "page/status.h"
#include "pool/mapped_pool.h"
#include "pool/pool.h"
#include "transports/transport.h"

namespace p2pkv {

// Used by one thread, but for `take_lent`. Local memory is written by `take_...`, by the reads of the plans
// and by unpacking what these brought.
class FetchBatch {
 public:
  // Why a page was missed, as counted by `misses`.
  enum Miss : size_t {
    kNotFound,
    kRejected,
    kPeerLost,
    kTimedOut,
    kChecksum,
    kNotPromoted,
    kUnreadable,
    kMissKinds
  };

  // From how far the bytes came that came from farthest.
  enum Farthest : size_t { kNowhere, kFromOwnPool, kFromPeers, kFromOwnDisk, kFromPeersDisk, kFarthests };

  // The pages that one owner is read for. A plan is a leg: the pieces that lie in one registered memory.
  struct Owner {
    uint64_t key;
    uint64_t boot;
    std::vector<size_t> pages;
    std::vector<int32_t> legs;
    uint64_t nbytes = 0;   // of the pages
    uint32_t n_tries = 0;  // how often one of them was read elsewhere in vain, in this round
  };
  struct Plan {
    std::vector<Span> spans;
    std::vector<Word> words;    // one a span
    std::vector<size_t> taken;  // Takes::tags: the page that a span is taken for; empty if none is
  };
  struct Taken {
    size_t n_pages = 0;
    uint64_t nbytes = 0;
  };

  // `memory_of` says for each piece in which registered memory it lies.
  FetchBatch(std::vector<Key> keys, std::vector<Piece> pieces, std::vector<int32_t> memory_of,
             size_t n_pieces);

  // Has pages taken where they lie, instead of being copied to the pieces, which nothing is written to then.
  // The batch leaves what can't be taken, says what was taken, and is good for nothing else.
  void take_with(std::shared_ptr<PageTaker> taker) { taker_ = std::move(taker); }
  PageTaker* taker() const { return taker_.get(); }

  // Copies the pages that this node's own pool has; what is not copied by the deadline is missed. False if
  // one of them has another length there.
  bool take_own(Pool* pool, const Deadline& deadline, Taken* taken);
  // Copies those of the rest that the pool of this host's node has. Appends them to `pages`; returns how many
  // of them are guests.
  size_t take_mapped(const MappedPool& pool, MappedPool::Find what, bool check_sums, const Deadline& deadline,
                     Taken* taken, std::vector<size_t>* pages);

  // Reads what is still missing and lies on this node's disk. What is not there by the deadline stays
  // missing.
  void take_from_disk(Tier* tier, const Deadline& deadline, Taken* taken);

  // Takes locations from the cache, as far as their owners are in the shard's view. Returns how many it took.
  size_t locate_cached(LocationCache* cache, Shard* shard);
  // The pages that are neither there nor located.
  std::vector<int64_t> unlocated() const;
  const Key& key(int64_t page) const { return keys_[static_cast<size_t>(page)]; }
  const std::vector<Key>& keys() const { return keys_; }
  // Takes the directory's answer for `pages`, and remembers it in the cache. Locations whose owner is not in
  // the view count for nothing.
  void locate(const int64_t* pages, const uint8_t* found, const Location* locations, size_t n, Shard* shard,
              LocationCache* cache);
  // The located pages that lie on their owners' disks only, and not on this node's.
  std::vector<int64_t> cold(uint64_t own_key) const;
  const Location& location(int64_t page) const { return locations_[static_cast<size_t>(page)]; }
  // The first located page whose length differs from its memory's, or -1, and the length it has.
  int64_t find_other_length(uint64_t* length, uint64_t* expected) const;

  // Groups what is located by owner; the groups stay until the next call. Pages that lead to `own_key` are
  // stale: the own pool did not have them. So are those whose word can't prove anything. Those still cold are
  // missed.
  const std::vector<Owner>& group_by_owner(uint64_t own_key);
  // One of an owner's legs. `is_lent`: its transport lends, so that packed pages are unpacked where they lie.
  struct Leg {
    int32_t memory;
    bool is_lent = false;
  };
  // `base`: where the leg's memory begins.
  Plan plan(const Owner& owner, const Leg& leg, int64_t base) const;
  // Takes a page, one of `Plan::taken`, out of memory that its owner may be writing to. Called by any thread
  // while the plan is read, once for a page.
  void take_lent(size_t page, const uint8_t* from);
  // Takes what became of the spans of a plan; returns the worst of it.
  Status land(const Owner& owner, const Leg& leg, const std::vector<Status>& statuses);
  // Counts an owner's pages as hits if all their pieces are OK and, if asked for, their checksum is right.
  // What came packed is unpacked first, until the deadline.
  Taken settle(const Owner& owner, bool check_sums, const Deadline& deadline);

  // Before pages are grouped by owner: has those that several nodes hold read from the one that is chosen.
  void spread(HolderChoice& choice, HolderSpread& spread);
  // Whether a page of this group that is no hit may be had from another holder.
  bool has_elsewhere(const Owner& owner, HolderChoice& choice) const;
  // Whether one of these may be had from a holder that was not tried yet.
  bool has_untried(const Owner& owner, HolderChoice& choice) const;
  // Has the pages of a settled group that were missed read from their next holders, if there are any.
  // `fate`: what is known of their holder by that, if it has not said that it has a page no more. Appends the
  // groups that are to be read now; they stay for as long as the batch.
  void reroute(const Owner& owner, HolderChoice::Fate fate, HolderChoice& choice,
               std::vector<const Owner*>* rerouted);
  // Whether the directory was not asked in this call where a page of this group lies.
  bool has_cached(const Owner& owner) const;
  // Whether a page was missed that another look-up may find.
  bool is_worth_another_look() const;
  // Has what was late in a settled group looked up once more, as if its peer were lost.
  void give_up(const Owner& owner);
  // Has the pages that were brought by another holder than the first one looked for there from now on, and at
  // the first one when that fails.
  void remember_rerouted(LocationCache* cache, HolderChoice& choice) const;
  // Notes which pages of the groups so far were read from whom.
  void note_reads(Touches* touches) const;
  // Whether all pages are hits, and there are no stale locations of theirs for `forget_stale` to tell of.
  bool is_over() const { return stale_.empty() && std::find(hits_.begin(), hits_.end(), 0) == hits_.end(); }

  // Makes what was rejected, or lost with its peer, unlocated again and forgets where it was said to be.
  // Appends what was rejected, for the directory's compare-and-delete. But what was rejected where the owner
  // has a disk tier becomes cold: the owner knows best where it is, and tells the directory itself. Returns
  // the number of pages that are worth another attempt.
  size_t forget_stale(uint64_t own_key, LocationCache* cache, std::vector<Key>* keys,
                      std::vector<Location>* locations);

  size_t n_pages() const { return keys_.size(); }
  uint64_t nbytes() const { return nbytes_; }
  const Stopwatch& stopwatch() const { return stopwatch_; }
  Farthest farthest() const { return farthest_; }
  void came_from(Farthest where) { farthest_ = std::max(farthest_, where); }
  // Reads that failed a check so far, those that were made up for later included.
  uint64_t n_failed_checks(Miss miss) const { return n_failed_checks_[miss]; }
  const std::vector<uint8_t>& outcomes() const { return hits_; }
  std::array<uint64_t, kMissKinds> misses() const;
  // Why a page that is no hit was missed.
  Miss why_missed(size_t page) const { return static_cast<Miss>(miss_kinds_[page]); }

 private:
  enum class State : uint8_t { kUnlocated, kLocated, kSettled };
  // Tells what became of a page that came packed, as far as its reads know.
  enum class Unpacked : uint8_t { kNotYet, kDone, kFailed };

  void group(size_t page, Owner* owner);
  PageBatch as_page_batch() const { return {n_pages(), n_pieces_, keys_.data(), pieces_.data()}; }
  void took(size_t page, Taken* taken);
  void unpack(const Owner& owner, const Deadline& deadline);
  Status worst_of(size_t page) const;
  void note_reads_from(const Owner& owner, Touches* touches) const;
  void fail(size_t page, Status status);
  void miss(size_t page, Miss why);
  Piece read_part(size_t page, size_t piece, uint64_t before) const;
  bool is_taken_lent(size_t page, const Leg& leg) const;
  template <typename Take>
  void each_span(const Owner& owner, const Leg& leg, const Take& take) const;
  bool has_right_checksum(size_t page) const;

  const Stopwatch stopwatch_;
  uint64_t nbytes_ = 0;
  Farthest farthest_ = kNowhere;
  std::array<uint64_t, kMissKinds> n_failed_checks_{};
  const std::vector<Key> keys_;
  const std::vector<Piece> pieces_;
  const std::vector<int32_t> memory_of_;
  const size_t n_pieces_;
  std::shared_ptr<PageTaker> taker_;  // null: pages are copied
  std::vector<uint64_t> lengths_;
  std::vector<Location> locations_;
  std::vector<State> states_;
  std::vector<uint8_t> hits_;
  std::vector<uint8_t> miss_kinds_;  // of those that are no hits
  std::vector<Status> of_pieces_;
  std::vector<Unpacked> unpacked_;
  std::vector<uint8_t> is_looked_up_;  // by page: the directory was asked; empty: it was asked for none
  std::vector<Owner> owners_;
  std::list<Owner> rerouted_;
  std::vector<size_t> rerouted_pages_;
  std::vector<Key> stale_keys_;  // of pages that were found elsewhere, and where they were not any more
  std::vector<Location> stale_;
};

}  // namespace p2pkv
