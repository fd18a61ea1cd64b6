// The published pool: committed pages in a shared region that peers read without asking.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/polite_mutex.h"
#include "codec/packed.h"
#include "page/change_log.h"
#include "page/location.h"
#include "page/page_giver.h"
#include "page/region.h"
#include "pool/eviction_log.h"
#include "pool/kept_records.h"
#include "pool/packing_choice.h"
#include "pool/page_blocks.h"
#include "pool/page_index.h"
#include "pool/page_table.h"
#include "pool/pin_table.h"

namespace p2pkv {

// What became of one page of a publish. Mirrors PoolStatus in p2pkv/pool.py.
enum class PoolStatus : uint8_t {
  kStored = 0,
  kExists = 1,       // was there already, or another thread was faster; nothing is kept of this copy
  kNoRoom = 2,       // everything else is reserved or held
  kTooLarge = 3,     // larger than the pool
  kOtherLength = 4,  // the key is there with another length: somebody's namespace is wrong
  kNotTried = 5,     // another page of the batch is there with another length, so nothing was stored; or it
                     // could not be given
  kTimedOut = 6,  // the deadline had passed before room was found for it, or when its turn to be copied came
  kChanged = 7,   // its bytes changed while it was packed: nothing is kept of it
};

// What became of one page of a fetch.
enum class FetchStatus : uint8_t { kMiss = 0, kHit = 1, kOtherLength = 2, kTimedOut = 3, kUnreadable = 4 };

constexpr double kNoHurry = 86400;  // seconds: as good as no deadline

// `n_pages` keys, each with `n_pieces` pieces that make up the page, one after the other. Borrowed for the
// call.
struct PageBatch {
  size_t n_pages;
  size_t n_pieces;
  const Key* keys;
  const Piece* pieces;

  // Bytes of a page's pieces.
  uint64_t length_of(size_t page) const {
    uint64_t length = 0;
    for (size_t k = 0; k < n_pieces; ++k) length += static_cast<uint64_t>(pieces[page * n_pieces + k].nbytes);
    return length;
  }
};

// Whom a publish asks whose pages lie in the memory of another process, which may want it back at any time.
class Consent {
 public:
  virtual ~Consent() = default;
  // Whether there is no use in copying on.
  virtual bool is_withdrawn() = 0;
  // Called once, when the last byte has been copied and no lock is held. Nothing is kept of what was copied
  // if it is false.
  virtual bool begin_commit() = 0;
};

// A block for a page that comes from elsewhere than a caller's memory, between `reserve_blocks` and
// `commit_blocks`: nobody else sees it, and `data` may be written.
struct Block {
  Key key;
  uint64_t length = 0;
  uint64_t checksum = 0;
  uint64_t packed = 0;    // bytes of the packed form that is to lie there; 0: the page as it is
  bool is_guest = false;  // another node's page (pool/guests.h)
  uint32_t granule = UINT32_MAX;
  uint8_t* data = nullptr;
};

struct PoolOptions {
  uint64_t nbytes;          // of pages; a multiple of `granule`
  uint32_t granule = 4096;  // what blocks are whole multiples of; a multiple of 64
  uint64_t owner = 0;       // goes into every location
  uint64_t boot = 0;        // goes into every location
  uint32_t region = 0;      // goes into every location
  bool has_disk = false;    // goes into every location of an own page
  Packing packing = Packing::kOff;
  bool is_shown = false;          // processes of this host find its pages by themselves (pool/mapped_pool.h)
  uint64_t pinned_limit = 0;      // bytes of blocks that pins may hold; 0: half of the pool
  RegionOptions memory;           // how it is made; where it is kept, a successor may go on with it
  size_t evictions_kept = 65536;  // a guess: a second of evictions of 64 KiB pages at 4 GB/s
  // Is told of pages that come and go; null: nobody is.
  std::shared_ptr<ChangeLog> changes;
  // Bytes of a round of pages that are given: enough that what it takes to begin one is little beside it, and
  // so few that they are still in the last cache when they are summed.
  uint64_t given_at_once = 8 << 20;
  int64_t (*now_ns)() = steady_now_ns;
};

struct PoolStats {
  uint64_t capacity;  // bytes
  uint64_t used;      // bytes of blocks: of pages, of pages being copied in, of retracted ones that are held
  uint64_t pages;     // committed
  uint64_t pinned_bytes;  // of blocks held by pins
  uint64_t stored_pages;  // the counters below only grow
  uint64_t evicted_pages;
  uint64_t no_room_pages;
  uint64_t dropped_evictions;  // records the log had no room for
  uint64_t untold_evictions;   // records that nobody has drained yet
  uint64_t guest_hits;         // pages of other nodes that this one's calls fetched; only grows
  PackedPages packed;
};

// A page and when it was used: the greater `stamp`, the later (SizeQueues).
struct PageUse {
  Key key;
  uint64_t stamp;
  uint64_t nbytes;  // of the page
};
static_assert(sizeof(PageUse) == 32);

// Whose pages a publish stores, and how much of the pool they may have together, with what he publishes at
// the same time: for more than that his own go. There are `Pool::kMostAccounts`, numbered from 1 on.
struct PoolShare {
  uint32_t account = 0;  // nobody's: it has no limit
  uint64_t nbytes = UINT64_MAX;
};

// It counts what shares of the pool cost those who have them.
struct ShareStats {
  uint64_t evicted_pages;  // that went for others of their own account; these counters only grow
  uint64_t
      refused_pages;  // that were not stored, since no page of their own account was there to go for them
  // These were of other accounts, and went for one that grew, as the bytes that were left lay in short
  // pieces.
  uint64_t outgrown_pages;
};

// Thread-safe. One mutex guards all bookkeeping; bytes are copied without it, and what takes more than a few
// hundred steps lets others in between.
//
// The region is [generation words, one per granule | padding to 4096 | data]; PageBlocks has the invariants.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  static constexpr uint32_t kMostAccounts = SizeQueues::kMostAccounts;

  // Null, with the reason in `error`.
  static std::shared_ptr<Pool> create(PoolOptions options, std::string* error);

  // Goes on with the memory that a process of before has left, of which these are the descriptors; the caller
  // keeps them. `lock` is of `records`, and says that nobody writes to it any more. Takes the pages as they
  // are, under the options' `boot`, but for guests, whose sources may have taken them back meanwhile. Null,
  // with the reason in `error`, if anything is not as it has to be: then nothing was changed.
  static std::shared_ptr<Pool> adopt(PoolOptions options, int pool, int records, WriterLock lock,
                                     std::string* error);

  // Copies in what is not there yet, evicting what was used longest ago. When room runs out the front of the
  // batch is kept: pages at the front of a prefix matter most; for the same reason they become the last to be
  // evicted. `locations` are of the pages that can be read now, stored or found; zeros for others. Stores
  // nothing if a page of the batch is there with another length. Returns `n_hidden` as it was when the batch
  // had its room: if it is still that, all that can be read then is still there.
  // A page whose copy has begun is copied to its end; the others are given up at the deadline. What
  // `consent`, if there is one, does not agree to is kTimedOut. What has no room in the `share` is kNoRoom;
  // what the batch has that is there already does not go for the rest of it then.
  // With a `giver`, of a pool that takes given ones, pages are brought by it, and of their pieces only the
  // lengths count. What it can't bring is kNotTried.
  uint64_t publish(const PageBatch& batch, PoolStatus* statuses, Location* locations,
                   const Deadline& deadline = Deadline::after(kNoHurry), Consent* consent = nullptr,
                   const PoolShare& share = {}, PageGiver* giver = nullptr);
  bool takes_given() const;
  // Copies out. A page whose length differs from its pieces' sum is left alone. The deadline is as above.
  // With a `taker` pages are taken instead, and those that it does not have are misses; so are packed ones.
  void fetch(const PageBatch& batch, FetchStatus* statuses,
             const Deadline& deadline = Deadline::after(kNoHurry), PageTaker* taker = nullptr);
  void lookup(const Key* keys, size_t n, uint8_t* found, Location* locations);

  // Finds room for pages whose key, length and checksum are set, evicting as a publish does. `kStored`: it
  // has a block, which must be committed.
  void reserve_blocks(Block* blocks, size_t n, PoolStatus* statuses,
                      const Deadline& deadline = Deadline::after(kNoHurry));
  // Makes pages visible where `is_filled`, which says that `data` holds bytes of the checksum, and gives the
  // other blocks back; each block once. Pages that can be read then are `found`, and pinned for the lease as
  // far as the limit allows: a ticket is 0 where there is no pin.
  void commit_blocks(const Block* blocks, size_t n, const uint8_t* is_filled, double lease_seconds,
                     uint8_t* found, uint64_t* tickets, Location* locations);
  // Makes those that are there the last to be evicted, the front of the batch the very last. Returns how many
  // are there.
  size_t touch(const Key* keys, size_t n);
  // The pages that are evicted next, at most `max` of at most `nbytes` together: oldest use first.
  void list_oldest(size_t max, uint64_t nbytes, std::vector<Key>* keys);

  // Keeps the blocks of the pages found from being reused until unpin or the lease's end, at most
  // `pinned_limit` bytes of them, and of this call `most_bytes`. A ticket is 0 where `found` is.
  void pin(const Key* keys, size_t n, double lease_seconds, uint8_t* found, uint64_t* tickets,
           Location* locations, uint64_t most_bytes = UINT64_MAX);
  // The bytes of the blocks that these pins hold, a block that several hold once for each.
  uint64_t pinned_nbytes(const uint64_t* tickets, size_t n);
  // `held`: 1 where the pin held until now, so that what was read under it is right.
  void unpin(const uint64_t* tickets, size_t n, uint8_t* held);

  // Takes pages out; `locations` are where they were. Readers find them stale from then on; a held page's
  // block is freed when the last hold goes.
  void retract(const Key* keys, size_t n, uint8_t* found, Location* locations);
  // Takes out those pages that still have these generations, logging them as evicted; returns their number.
  size_t retract_exactly(const Key* keys, const uint64_t* generations, size_t n,
                         PageEvent why = PageEvent::kRetracted);
  // Takes out all pages that are there when it is called, and maybe some that are published meanwhile,
  // logging them as evicted; returns their number. `why` goes into the history.
  uint64_t purge(PageEvent why = PageEvent::kCleared);

  // Appends to `pages` at most `max` committed pages from `cursor` on (0: the beginning); returns the next
  // cursor, 0 at the end. What is there throughout is listed exactly once.
  uint64_t list(uint64_t cursor, size_t max, std::vector<Eviction>* pages);

  // The same of when pages were used that are not guests.
  uint64_t list_uses(uint64_t cursor, size_t max, std::vector<PageUse>* pages);
  // Takes those guests for own pages that still have these generations.
  void make_own(const Key* keys, const uint64_t* generations, size_t n);

  std::vector<Eviction> drain_evicted(size_t max, double timeout, double gather = 0) {
    return log_.drain(max, timeout, gather);
  }
  // Has who drains evictions return without any: what tells of them has other news.
  void wake_drainer() { log_.wake(); }
  // Wakes those who drain. The memory stays.
  void close() { log_.close(); }
  // Ends all pins and takes all pages out, without a word in the log; nothing is found or stored from then
  // on. Gives the memory back at once if nobody is copying, else when the last reference goes; true if at
  // once. Nobody may read under a pin any more, nor through a transport.
  bool release_memory();
  // The same, but the pages stay as they are, for a successor. Of memory that is kept.
  bool leave_memory();

  // The descriptor of the records of a pool that is kept or shown; -1 where it has none.
  int records_fd() const { return kept_ ? kept_->fd() : -1; }
  // That of the index of one that is shown; -1 where it has none.
  int index_fd() const { return index_ ? index_->fd() : -1; }
  // Has memory that was left mapped in behind the caller's back, which whoever takes it over is better
  // without: his other threads wait for it.
  void map_behind();
  // Keeps what must be known of epochs to find, and not to find, what is here; it does nothing in a pool that
  // is not kept, or released.
  void keep_epochs(const std::vector<NamespaceEpoch>& epochs);
  // Those that were kept when this pool began.
  const std::vector<NamespaceEpoch>& first_epochs() const { return first_epochs_; }
  // Keeps for a successor which boots have these pages; as above.
  void keep_boots(const KeptBoots& boots);
  // Those of the lives before this pool began; zeros if it is not known that they are the same memory's.
  const KeptBoots& first_boots() const { return first_boots_; }

  PoolStats stats();
  ShareStats share_stats();
  // Bytes of the blocks of an account's pages, of those that are being stored, and of taken out ones that are
  // held.
  uint64_t charged_nbytes(uint32_t account);
  // How many pages were taken out of sight so far, by eviction or otherwise.
  uint64_t n_hidden();
  const SharedRegion& region() const { return *region_; }
  uint64_t data_offset() const { return data_offset_; }
  // Locations name this boot of the owner from now on.
  void set_boot(uint64_t boot) {
    boot_ = boot;
    if (index_) index_->set_boot(boot);
  }
  uint32_t granule() const { return options_.granule; }
  uint64_t data_nbytes() const { return options_.nbytes; }

 private:
  // One page of a publish between its reservation and its commit.
  struct Draft {
    uint32_t granule = PageBlocks::kNone;
    uint64_t length = 0;
    uint64_t checksum = 0;
    codec::Size packed;    // what it is stored as; nothing: as it is
    uint64_t pack_ns = 0;  // that it took to find that out
    bool is_guest = false;

    uint64_t stored() const { return packed.nbytes != 0 ? packed.nbytes : length; }
  };
  // A batch's search for room, which remembers where it failed, so that no page makes it search in vain
  // again.
  struct Room {
    const Deadline& deadline;
    PoolShare share{};
    bool is_share_full = false;                // that is why there is no room
    PoolStatus refusal = PoolStatus::kStored;  // from then on kNoRoom or kTimedOut, for all that follow
    uint64_t n_hidden_by_others = 0;           // while they were let in
  };
  using Lock = std::lock_guard<PoliteMutex>;

  // Where all that a pool consists of lies.
  struct Plan {
    PoolOptions options;
    uint64_t n_granules = 0;
    uint64_t data_offset = 0;

    uint64_t region_nbytes() const { return data_offset + options.nbytes; }
    KeptRecords::Layout layout(int region) const;
    // Makes it if the pool is to be shown; false, with the reason in `error`, if it is not to be had.
    bool make_index(std::unique_ptr<PageIndex>* index, std::string* error) const;
  };

  // Holds the mappings that a pool lies in; `kept` and `index` may be null.
  struct Memory {
    std::unique_ptr<SharedRegion> region;
    std::unique_ptr<KeptRecords> kept;
    std::unique_ptr<PageIndex> index;
  };

  Pool(const Plan& plan, Memory memory, uint64_t first_word);

  static bool plan(PoolOptions options, Plan* plan, std::string* error);
  void unmap();
  bool take_left(uint32_t n_pages, std::string* error);

  // Without the lock.
  std::vector<codec::Block> measure(const PageBatch& batch, std::vector<Draft>* drafts,
                                    const Deadline& deadline);
  // Without the lock, and by several threads at once. False if nothing of use was written.
  bool copy_in(const PageBatch& batch, size_t i, Draft* draft);
  void have_given(const PageBatch& batch, PageGiver& giver, std::vector<Draft>* drafts, PoolStatus* statuses,
                  const Deadline& deadline);
  bool copy_out(const PageBatch& batch, size_t i, uint32_t granule) const;
  void have_taken(const std::vector<uint32_t>& granules, PageTaker& taker, FetchStatus* statuses,
                  const Deadline& deadline);
  bool pack_in(const PageBatch& batch, size_t i, Draft* draft);
  bool unpack_out(const PageBatch& batch, size_t i, uint32_t granule) const;
  uint64_t granules_of(const Draft& draft) const;

  // All below with the lock.
  bool touch_existing(const PageBatch& batch, const std::vector<Draft>& drafts, PoolStatus* statuses,
                      Location* locations);
  PoolStatus reserve(const Key& key, Draft* draft, Room* room);
  void hold_existing(const PageBatch& batch, std::vector<Draft>* drafts);
  bool still_holds(Draft* draft);
  void count_no_room(const Room& room);
  PoolStatus commit(const Key& key, const Draft& draft, Location* location);
  uint32_t allocate(uint64_t n_granules, Room* room);
  void let_in(Room* room);
  int64_t lease_end(double seconds) const;
  uint64_t pin_one(uint32_t granule, int64_t deadline_ns);
  void evicted(uint32_t granule);
  void prefetch(const Key& key) const;
  void enter(uint32_t granule);
  void leave(uint32_t granule);
  void take_out(uint32_t granule, PageEvent why);
  void note(uint32_t granule, PageEvent event);
  void note_refused(const Key& key, PoolStatus status);
  void release_if_unheld(uint32_t granule);
  void unpin_page(uint32_t granule);
  void expire_pins();

  Location location_of(uint32_t granule) const;
  uint8_t* data_at(uint32_t granule) const;
  uint64_t block_nbytes(uint32_t granule) const {
    return uint64_t{options_.granule} * blocks_.length_of(granule);
  }

  const PoolOptions options_;
  std::atomic<uint64_t> boot_{options_.boot};
  const uint64_t data_offset_;
  // Null: only this process reads them. It has the writers' lock.
  const std::unique_ptr<KeptRecords> kept_;
  const std::unique_ptr<SharedRegion> region_;
  const std::unique_ptr<PageIndex> index_;  // null: it is not shown
  std::vector<NamespaceEpoch> first_epochs_;
  KeptBoots first_boots_;
  EvictionLog log_;
  PackingChoice packing_;
  PoliteMutex mutex_;  // guards all below, and the words
  PageTable pages_;
  PageBlocks blocks_;
  PinTable pins_;
  uint64_t pinned_bytes_ = 0;
  uint64_t n_stored_ = 0;
  uint64_t n_evicted_ = 0;
  uint64_t n_no_room_ = 0;
  uint64_t n_over_share_ = 0;  // pages of these
  uint64_t n_guest_hits_ = 0;
  uint64_t n_hidden_ = 0;
  bool is_released_ = false;
};

}  // namespace p2pkv
