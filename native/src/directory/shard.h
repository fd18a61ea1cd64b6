// A node's part of the directory: which owner holds a page, and where.
//
// Soft state. Everything in it may be stale, and a stale entry costs its reader a miss, never a wrong byte:
// reads are validated. A key may have several owners; a look-up answers with one that is in the view.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "directory/other_holders.h"
#include "directory/owner_lives.h"
#include "directory/ring_table.h"
#include "directory/spare_holders.h"
#include "net/wire.h"
#include "page/location.h"
#include "page/page_history.h"

namespace p2pkv {

// Thread-safe. The table is cut into stripes, each with its own lock, so that growing one never stalls a
// look-up for long. Times are whole seconds as `now` says them, given by the caller.
class Shard {
 public:
  struct Stats {
    uint64_t entries;
    uint64_t tombstones;
    uint64_t nbytes;
  };

  // What is known of a key's page at one owner.
  struct Known {
    Location location;
    uint32_t age;      // seconds since it was said
    bool is_live;      // else its owner, or a reader, has taken it back
    bool is_counting;  // its owner is in the view, in this life, and it is no leftover
  };

  // `history`, if there is one, is told of entries that go.
  explicit Shard(uint64_t max_entries, std::shared_ptr<PageHistory> history = nullptr);

  // Sets `found[i]` to 1 and `locations[i]` when an owner in the view holds `keys[i]`, in its pool if there
  // is such a one; else `found[i]` to 0. Leftovers are not found.
  void get(const Key* keys, size_t n, uint8_t* found, Location* locations);

  // Says for each key how many holders are named, `most` (at most kMostHolders) or fewer, and appends their
  // locations, key after key: those that have the page in their pool first. Of these the one whose entry
  // comes first stays first, which mostly is the page's owner and not a guest's; where more are there than
  // may be named, the rest are others in each call, so that readers come to know all who have a page.
  void get_holders(const Key* keys, size_t n, size_t most, uint8_t* n_named,
                   std::vector<Location>* locations);

  // Says where pages lie that this node itself has, and sets `found[i]` to 1 for these and else to 0.
  // Thread-safe, and does not wait.
  using Held = std::function<void(const Key* keys, size_t n, uint8_t* found, Location* locations)>;
  // From now on this is what the node has; empty: nothing.
  void serve_held(Held held);
  void get_held(const Key* keys, size_t n, uint8_t* found, Location* locations);

  // All that is known of a key, what does not count included.
  std::vector<Known> entries_of(const Key& key, uint32_t now);

  // Stores the entries whose sequence is newer than what their owner said before. Returns how many were
  // refused because the shard is full.
  size_t put(const wire::PutEntry* entries, size_t n, uint32_t now);
  // Stores those that are this shard's own by the ring of the view, and says in `is_own` which are.
  void put_own(const wire::PutEntry* entries, size_t n, uint32_t now, uint8_t* is_own);

  // Deletes the entries that still are the ones named, leaving a tombstone against late retries of their put.
  void drop(const wire::DropEntry* entries, size_t n, uint32_t now);

  // Whole seconds of the steady clock, or what `set_time` was told last.
  uint32_t now() const;
  // Lets the shard live in a simulation's time, from the first call on.
  void set_time(uint32_t seconds) { simulated_now_ = seconds; }

  // Sets `kept[i]` to 1 where it would change nothing to put this entry: it is there, or the key has as many
  // owners as it may; else to 0.
  void check(const wire::CheckEntry* entries, size_t n, uint8_t* kept);

  // Remembers from now on which pages of this owner, the node itself, others find stale: only their owner
  // knows whether they are.
  void watch(uint64_t owner) { watched_ = owner; }
  // The same is done for these, which others may not have been told of.
  void doubt(const Key* keys, size_t n);
  // Takes the keys of at most `limit` of them, each once.
  std::vector<Key> take_doubted(size_t limit);
  // Takes at most `limit` holders that are to put their entries again: there was no place for these, and
  // there is now.
  std::vector<SpareHolders::Called> take_called(size_t limit);

  // From now on only entries of these owners' lives count. Those of who is away are kept meanwhile, in places
  // that nobody else needs.
  void set_view(const std::vector<OwnerLives::Life>& lives);
  // The same of owners whose pages end with each boot.
  void set_view(const uint64_t* owners, const uint64_t* boots, size_t n);

  // From now on these are the rings by which the shard's own node may be asked for a key: that of the view,
  // and the one without its newcomers while there are any. What is no key of its own by any of them is a
  // *leftover*: other shards are told now what becomes of the page. Looks at every entry, a stripe at a time,
  // if the rings were others so short ago that not all leftovers have been swept.
  void set_rings(std::vector<std::shared_ptr<const RingTable>> rings);

  // Somebody who hears of every change of the view says that it is up to date. While nobody does, as when
  // the interpreter is held, an owner that is not in the view may have joined since, and a key may be this
  // shard's by now: nothing is dropped for it, and nothing is a leftover.
  void confirm_view(uint32_t now);

  // Clears `found[i]` where `locations[i]` is of an owner, or a life of one, that is not in the view, and has
  // the others name the boot that their owners have now.
  void keep_present(Location* locations, uint8_t* found, size_t n);

  // Drops what no longer counts in the next stripe; call it regularly. Bounded work: one stripe of kStripes.
  void sweep(uint32_t now);

  Stats stats();

  static constexpr size_t kStripes = 64;

 private:
  // How long an entry of an owner outside the view is kept, and how long the view must have been confirmed
  // without a gap when it is dropped: gossip about a newcomer may come after its first put.
  static constexpr uint32_t kUnknownOwnerSeconds = 10;
  // Beyond it, what others doubt is forgotten: its owner looks at every page now and then anyway.
  static constexpr size_t kMaxDoubted = 1 << 16;
  // The view is confirmed twice a second; more than this between two times is a gap.
  static constexpr uint32_t kConfirmedSeconds = 2;
  // What was put so short ago is no leftover: who put it may have heard of a change that is news here.
  static constexpr uint32_t kFreshSeconds = 3;
  // How long a tombstone outlives its entry: longer than any retry of a put can be under way.
  static constexpr uint32_t kTombstoneSeconds = 30;
  // Owners kept a key: enough to survive losing some, bounded so that a hot key can't fill the table. One
  // more takes the place of an owner outside the view, else, if it has the page in its pool, of one that has
  // it on disk. Else it is a spare one: who came first stays, which mostly is the page's owner, and not a
  // guest.
  static constexpr int kMaxOwners = 8;
  // Tombstones kept a key besides, unless all owners let go at once: those whose places others have taken,
  // so that a late put does not bring an entry back. The oldest goes for one more owner. That, and a full
  // shard, are where a late put can still do so, which costs its readers a miss.
  static constexpr int kMaxTombstones = 8;

  enum EntryState : uint8_t { kEmpty = 0, kLive = 1, kTombstone = 2 };

  struct Entry {
    Key key;
    uint64_t sequence;
    Location location;
    uint32_t stamp;
    uint8_t state;      // of EntryState
    uint8_t is_missed;  // its owner is away, and a spare holder was called in its place
    uint8_t padding[2];
  };
  static_assert(sizeof(Entry) == 96);

  // Open addressing with linear probing and backward-shift deletion; a key's entries lie on one probe path.
  struct Stripe {
    std::mutex mutex;
    std::vector<Entry> table;
    size_t used = 0;
    size_t tombstones = 0;
    SpareHolders spares;
    // Where the table lies, for `prefetch`, which has no lock: it may be told of a table that is gone, and
    // never reads what is there.
    std::atomic<const Entry*> first{nullptr};
    std::atomic<size_t> mask{0};

    void take(std::vector<Entry> next);
  };

  // The entries of a key, as somebody finds them who is to have one.
  struct Places {
    Entry* own = nullptr;          // his own, of either kind; all below are of others
    Entry* first_to_go = nullptr;  // of those that are live
    Entry* oldest_tombstone = nullptr;
    int n_live = 0;
    int n_tombstones = 0;
  };

  using Rings = std::vector<std::shared_ptr<const RingTable>>;

  // Tells which entries are leftovers. Empty where none is.
  class Leftovers {
   public:
    Leftovers() = default;
    Leftovers(std::shared_ptr<const Rings> rings, uint32_t now) : rings_(std::move(rings)), now_(now) {}

    // False: there are none.
    bool may_be() const { return rings_ != nullptr; }
    bool has(const Entry& entry) const { return is_foreign(entry) && !is_fresh(entry); }
    // Whether it is one, or will be.
    bool is_foreign(const Entry& entry) const;

    bool is_fresh(const Entry& entry) const;

   private:
    std::shared_ptr<const Rings> rings_;
    uint32_t now_ = 0;
  };

  // By other bits than the ring goes by: a shard's keys lie on few arcs of it.
  Stripe& stripe_of(const Key& key) { return stripes_[key.bytes[15] % kStripes]; }
  static size_t slot_of(const Stripe& stripe, const Key& key) {
    return hash_of(key) & (stripe.table.size() - 1);
  }
  // Has the lines come where a key's entries begin: a table of millions of entries lies in no cache.
  void prefetch(const Key& key) const;
  static bool insert(Stripe& stripe, const Entry& entry);
  static void grow(Stripe& stripe);
  static void erase(Stripe& stripe, size_t slot);
  // Whether there is any entry of the key, a tombstone included.
  static bool knows(const Stripe& stripe, const Key& key);
  static Places places_of(Stripe& stripe, const Key& key, uint64_t owner, const OwnerLives& lives);
  bool put_one(Stripe& stripe, const wire::PutEntry& entry, const OwnerLives& lives, uint32_t now);
  // Whether the entry is one to answer with.
  static bool counts(const Entry& entry, const OwnerLives& lives);
  static bool is_resident(const Entry& entry) { return (entry.location.flags & kResident) != 0; }
  // Whether `a` is the better one of a key's live entries to be replaced.
  static bool goes_before(const Entry& a, const Entry& b, const OwnerLives& lives);
  bool keeps(Stripe& stripe, const wire::CheckEntry& entry, const OwnerLives& lives);
  void doubt(const wire::DropEntry* entries, size_t n);
  void drop_one(Stripe& stripe, const wire::DropEntry& entry, const OwnerLives& lives, uint32_t now);
  std::shared_ptr<const OwnerLives> lives();
  std::shared_ptr<const Rings> rings();
  static bool has_place_in(const Rings& rings, const Key& key);
  // What is one now. Nothing if all stripes have been swept since the last came, or if nobody says that the
  // rings are those of the moment.
  Leftovers leftovers(uint32_t now);
  bool is_up_to_date(uint32_t now) const;
  // Whether there are entries left that will be leftovers soon.
  bool erase_leftovers(Stripe& stripe, const Leftovers& left);
  template <typename IsGone>
  static void erase_if(Stripe& stripe, IsGone is_gone);
  // An entry has come that may be a leftover; or the rings have changed, and any may be one.
  void look_for_leftovers() { n_unswept_ = kStripes + 1; }
  // Whether who is not in the view has no place in it.
  bool knows_everybody(uint32_t now);

  void note(const Entry& entry, PageEvent event);

  const uint64_t max_entries_a_stripe_;
  const std::shared_ptr<PageHistory> history_;
  std::array<Stripe, kStripes> stripes_;
  std::atomic<int64_t> simulated_now_{-1};  // below zero: the clock's time counts
  std::atomic<uint64_t> watched_{0};
  std::mutex doubts_mutex_;
  std::unordered_set<Key, KeyHash> doubted_;  // guarded by doubts_mutex_
  std::mutex held_mutex_;
  std::shared_ptr<const Held> held_;  // guarded by held_mutex_; null: this node has nothing
  std::mutex lives_mutex_;
  std::shared_ptr<const OwnerLives> lives_;  // guarded by lives_mutex_, as all below; replaced, never changed
  std::shared_ptr<const Rings> rings_;       // null: not known
  bool is_confirmed_ = false;                // ever
  uint32_t confirmed_since_ = 0;             // without a gap
  uint32_t confirmed_at_ = 0;
  size_t next_sweep_ = 0;             // used by the sweeping thread only
  std::atomic<uint64_t> n_draws_{0};  // questions for holders so far
  // How many stripes may have leftovers, and one that was being swept when that was found out.
  std::atomic<size_t> n_unswept_{0};
};

}  // namespace p2pkv
