// Guests: pages of other nodes in this node's pool, and how they go when their source takes them back.
//
// A node that prefetches *follows* the nodes it reads from: each keeps a number that grows with everything it
// takes back, tells its followers what that was, and they take out what they had from it. docs/design.md,
// "Guests", says why nothing that was taken back is found after that.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/polite_mutex.h"
#include "page/location.h"
#include "page/namespace_epochs.h"
#include "pool/pool.h"

namespace p2pkv {

// What a source has taken back so far, by its own count. `log` is another one after each start of a node.
struct TakenBack {
  uint64_t log;
  uint64_t number;
};

// A page as a follower names it: the one that has this key and this generation.
struct FollowedPage {
  Key key;
  uint64_t generation;
};
static_assert(sizeof(FollowedPage) == 24);

// What a source tells its followers: what it took back since it was at `before`. Mirrors TAKE_BACK in
// p2pkv/control/wire.py.
struct TakeBack {
  uint64_t source;
  uint64_t log;
  uint64_t before;
  uint64_t number;
  uint64_t is_all;  // 1: every page, and no keys follow
};
static_assert(sizeof(TakeBack) == 40);

// Under which count of its source's the bytes of a page were read.
struct Origin {
  uint64_t source;
  TakenBack since;
};
static_assert(sizeof(Origin) == 24);

// What became of one page of a `store`. Mirrors StoreStatus in p2pkv/cache/guests.py.
enum class StoreStatus : uint8_t {
  kStored = 0,
  kExists = 1,     // another one is there under this key, and stays
  kNoRoom = 2,     // or it is larger than the pool
  kTakenBack = 3,  // its source has taken something back meanwhile, or its namespace was bumped
  kChanged = 4,    // its bytes have another checksum
};

// Thread-safe. Lock order: this one's mutex, then the pool's.
//
// Invariant: a guest is in the group of its source, or in one that is going: all of a source's that it took
// back, of which some are taken out at a time, so that nobody waits for a million of them.
class Guests {
 public:
  // As many as a view has members, so that each of these has a place: who is none gives it up for one that
  // is, and beyond it nobody new may follow this node. Each is told of everything that is taken back.
  static constexpr size_t kMostFollowers = 4096;
  // For so long a follower that is no member is remembered. While it is none it can't be told anything.
  static constexpr int64_t kForgetAfterNs = 60'000'000'000;

  struct Stats {
    uint64_t pages;           // guests that are there, or were until they were evicted lately
    uint64_t n_taken_back;    // that went because their source took them back; only grows
    uint64_t n_sources_lost;  // times that all of a source went, since nobody knew what it had taken back
  };

  Guests(std::shared_ptr<Pool> pool, std::shared_ptr<NamespaceEpochs> epochs);

  // --- this node as the source of others' guests

  // Has `follower` told of what is taken back from now on, and says which pages are this node's own, so
  // that it will be told of them. False if there are too many followers.
  bool follow(uint64_t follower, const FollowedPage* pages, size_t n, uint8_t* is_own, TakenBack* known);
  // Counts that something was taken back, which is out of sight already. Returns the count after it.
  TakenBack count_taken_back();
  // The count as it is.
  TakenBack taken_back();
  std::vector<uint64_t> followers();
  // Forgets the followers that have been no members for kForgetAfterNs, by what this was called with since;
  // until it is called again these count as the members. Who comes back must be told of everything until it
  // has asked anew.
  void forget_absent(const std::vector<uint64_t>& members, int64_t now_ns);

  // --- this node as the holder of guests

  // Takes what a source has answered to a follow. Its guests stay if nothing can have been missed; otherwise
  // they are gone when this returns. `was_out_of_touch`: since the source's last answer this process has
  // stood still, or the two were no members of each other, so that an earlier run of it may have taken pages
  // back unheard.
  void followed(uint64_t source, TakenBack known, bool was_out_of_touch = false);
  // Takes out what a source says that it took back. If that may be all it had here they are only going, and
  // it is heard once `has_gone` says so of what this returns.
  uint64_t take_back(const TakeBack& told, const Key* keys, size_t n);
  // Takes out some of those that are going, half a millisecond of work, after others had the lock that wait
  // for it; false if none is left.
  bool take_turn();
  // Whether some are still on their way out.
  bool is_going();
  // Whether everything that was going when this ticket was given is gone.
  bool has_gone(uint64_t ticket);
  // Copies pages into the pool, with their lengths and checksums as `locations` say, whose bytes lie at
  // `addresses`. Nothing is stored of an epoch that is over. What is stored can be read at `locations` then.
  void store(const Key* keys, const int64_t* addresses, const Origin* origins, size_t n, uint64_t epoch,
             Location* locations, StoreStatus* statuses);
  // A source lets its guests go: this is all that it has ever taken back, and there will be no more. They are
  // this node's own from then on, unless some of it was not heard here: then they are gone. Appends the keys
  // of those that are own pages now.
  void adopt(uint64_t source, TakenBack last, std::vector<Key>* keys);
  // Takes all guests out: what their sources take back is not heard here any more.
  void take_out_all();
  // Whether a guest was ever stored.
  bool is_used() const { return is_used_; }
  // Whether the page with this key and generation is a guest.
  bool has(const Key& key, uint64_t generation);
  // Clears `found[i]` where the page at this location is a guest. Costs nothing while nothing was ever
  // stored.
  void leave_out(const Key* keys, const Location* locations, size_t n, uint8_t* found);
  // Takes out the guests among these pages; returns how many there were. Costs nothing while nothing was
  // ever stored.
  size_t take_out(const Key* keys, size_t n);
  // The same, of guests that this node has no use for any more.
  size_t evict(const Key* keys, size_t n);
  // The sources whose guests are here, after some that the pool has evicted were forgotten. What was
  // `followed` but not stored yet is forgotten too: one thread follows, stores and calls this.
  std::vector<uint64_t> sources();

  Stats stats();

 private:
  // Guests of one source; each knows its place here, so that it is forgotten at once.
  struct Group {
    uint64_t source;
    std::list<Key> keys;
  };
  struct Guest {
    uint64_t generation;
    Group* group;
    std::list<Key>::iterator place;
  };
  struct Follower {
    int64_t absent_since = 0;  // 0: it is a member, or was not looked for since it came
    uint64_t asked = 0;        // its last question's number among those of all
  };
  struct Source {
    TakenBack heard{};
    uint64_t behind = 0;  // what it said it was at, above `heard`, when it was last asked
    std::unique_ptr<Group> guests{};

    size_t n_pages() const { return guests ? guests->keys.size() : 0; }
  };
  using Lock = std::lock_guard<PoliteMutex>;

  // All below with the lock.
  bool has_place_for(uint64_t follower);
  bool is_guest(const Key& key, uint64_t generation) const;
  bool may_store(const Origin& origin, uint64_t epoch) const;
  bool adopt_some(uint64_t source, TakenBack last, std::vector<Key>* keys);
  void add(const Key& key, uint64_t source, uint64_t generation);
  void forget(const Key& key);
  void forget_evicted();
  size_t remove(const std::vector<Key>& keys, PageEvent why = PageEvent::kRetracted);
  std::vector<Key> those_of(const Key* keys, size_t n) const;
  void lose(uint64_t source, TakenBack known);
  void let_go(Source* source);

  const std::shared_ptr<Pool> pool_;
  const std::shared_ptr<NamespaceEpochs> epochs_;
  const uint64_t log_;
  std::atomic<bool> is_used_{false};  // something was stored, ever
  PoliteMutex mutex_;                 // guards all below
  uint64_t number_ = 0;
  std::map<uint64_t, Follower> followers_;
  uint64_t n_follows_ = 0;
  std::set<uint64_t> members_;  // those that this node was told of last
  std::unordered_map<Key, Guest, KeyHash> guests_;
  std::map<uint64_t, Source> sources_;
  std::deque<std::unique_ptr<Group>> going_;  // the front one first
  uint64_t n_gone_ = 0;                       // groups
  size_t next_bucket_ = 0;                    // of `guests_`: where the next look for evicted ones begins
  uint64_t n_taken_back_ = 0;
  uint64_t n_sources_lost_ = 0;
};

}  // namespace p2pkv
