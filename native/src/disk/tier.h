// The disk tier of a node: its pool and its disk store as one.
//
// What is published goes to the disk behind the publisher's back; what the pool has evicted is read from
// there by this node, or brought back into the pool for peers. docs/disk.md shows the flow.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "base/thread.h"
#include "disk/backlog.h"
#include "disk/store.h"
#include "disk/use_sketch.h"
#include "page/location.h"
#include "page/promoter.h"
#include "pool/guests.h"
#include "pool/pool.h"

namespace p2pkv {

class Promotions;

// When a page is written. Mirrors DISK_WRITE in p2pkv/config.py.
enum class WritePolicy : uint8_t { kWriteThrough = 0, kOnEvict = 1 };
// Which pages are. Mirrors DISK_ADMISSION.
enum class Admission : uint8_t { kAll = 0, kSecondUse = 1 };

struct TierOptions {
  WritePolicy write = WritePolicy::kWriteThrough;
  Admission admission = Admission::kAll;
  uint64_t owner = 0;                 // goes into the locations of pages on disk
  uint64_t boot = 0;                  // likewise
  uint64_t queue_size = 64 << 20;     // bytes of pool that waiting writes may pin; a quarter of it at most
  uint64_t warm_rate = 256ull << 20;  // bytes a second that are loaded for nobody who waits, at most
  // What is another node's is not written: the disk would not know when that node takes it back.
  std::shared_ptr<Guests> guests;
};

// Only grow; mirrored by name in `stats()`.
struct TierCounters {
  std::atomic<uint64_t> skipped_pages{0};    // not offered: the disk's queue is full, or the pins used up
  std::atomic<uint64_t> caught_up_pages{0};  // taken by the disk after they had been left out of its queue
  std::atomic<uint64_t> promoted_pages{0};
  std::atomic<uint64_t> promoted_bytes{0};
  std::atomic<uint64_t> failed_pages{0};    // could not be promoted: no room in the pool, or the disk failed
  std::atomic<uint64_t> late_pages{0};      // were not there yet when they had to be answered for
  std::atomic<uint64_t> refused_pages{0};   // too many were asked for already
  std::atomic<uint64_t> unwarmed_pages{0};  // not loaded for nobody who waits: others would have had to go
};

// Thread-safe. Without a store, or with one whose disk fails, nothing is found here and nothing is written.
// Only `read` and `close` wait for the disk, each until its deadline.
class Tier : public Promoter {
 public:
  // Null when the system has no thread to give.
  static std::shared_ptr<Tier> start(std::shared_ptr<Pool> pool, const TierOptions& options);
  ~Tier() override;

  // Begins to use a store, once. Its `release` must unpin the pool's tickets. A store that comes after
  // `close` is told what was taken back before it was there, and left alone.
  void attach(std::shared_ptr<disk::DiskStore> store);

  // Pages that were just published: to be written, as far as the policies say so. Never waits.
  void note_published(const Key* keys, size_t n);
  // Pages that were just asked for here: where a second use is what admits them, this may be it.
  void note_fetched(const Key* keys, size_t n) {
    if (uses_) note_published(keys, n);
  }
  // What a store calls with the pages that it has written. Those that the pool evicted while they were
  // written are then known to be nowhere: it has the directory told again. May be called for as long as the
  // store's writer runs, which may be longer than the tier lives: a disk that hangs outlives it.
  using StoredListener = std::function<void(const Key* keys, size_t n)>;
  StoredListener stored_listener() const;
  // Locations name this boot of the owner from now on.
  void set_boot(uint64_t boot) {
    pool_->set_boot(boot);
    boot_ = boot;
  }
  // Where pages are now: in the pool, else on disk (then the location is not resident).
  void locate(const Key* keys, size_t n, uint8_t* found, Location* locations);
  // Finds those on disk of the pages that are not `found`, unless its index is locked; it never waits.
  void locate_at_once(const Key* keys, size_t n, uint8_t* found, Location* locations);
  // Which pages could be read from disk now.
  void contains(const Key* keys, size_t n, uint8_t* found);
  void read(const disk::ReadBatch& batch, const Deadline& deadline, disk::ReadStatus* statuses);

  void promote(std::vector<Key> keys, Lease lease, Deadline answer_by, Done done) override;
  void release(uint64_t lease) override;
  void leave(uint64_t asker) override;
  // Keys that were promoted, or asked for in vain, for the directory.
  std::vector<Key> drain_changed(size_t max);

  // Take pages back, those on their way included, but for what is in the pool: before it is taken out of
  // that, and once more afterwards. Without a store they are remembered for it. Neither blocks.
  void forget(const Key* keys, size_t n);
  void clear();
  // Whether all that was taken back is written, so that no later run finds it however this one ends; waits.
  bool wait_cleared(const Deadline& deadline);
  // Answers all questions with what is there; after that nothing is called back. Leaves the store open.
  // Idempotent.
  void close();

  const TierCounters& counters() const { return counters_; }
  // Pages that wait for the disk to have time for them.
  size_t n_behind() const { return backlog_.size(); }

 private:
  Tier(std::shared_ptr<Pool> pool, const TierOptions& options);

  disk::DiskStore* store() const { return store_.load(std::memory_order_acquire); }
  uint64_t queue_limit() const;
  size_t offer(const Key* keys, size_t n, uint64_t limit, std::vector<Key>* left);
  void name_stored(const std::vector<uint8_t>& stored, const std::vector<disk::CatalogEntry>& entries,
                   uint8_t* found, Location* locations) const;
  void leave_out_guests(const std::vector<Key>& keys, const std::vector<Location>& locations,
                        std::vector<uint8_t>* found, std::vector<uint64_t>* tickets);
  size_t write_pinned(disk::DiskStore& store, const std::vector<Key>& keys, uint64_t* room,
                      std::vector<Key>* left);
  void keep_present(const std::vector<Key>& keys, std::vector<Key>* left);
  void spill_all();
  void catch_up();
  size_t catch_up_once();
  bool remember(const Key* keys, size_t n);
  void forget_older(disk::DiskStore& store, const std::vector<disk::CatalogEntry>& entries, uint8_t* known);

  const std::shared_ptr<Pool> pool_;
  const TierOptions options_;
  std::atomic<uint64_t> boot_{options_.boot};
  TierCounters counters_;
  std::atomic<disk::DiskStore*> store_{nullptr};  // of `owned_store_`, which is set once
  std::shared_ptr<disk::DiskStore> owned_store_;
  std::unique_ptr<UseSketch> uses_;  // null: all are admitted
  disk::Backlog backlog_;            // of what is written through
  std::unique_ptr<Promotions> promotions_;

  std::mutex mutex_;                   // guards what follows
  std::condition_variable published_;  // or left out of the disk's queue
  std::vector<Key> early_;             // taken back before there was a store
  bool is_all_early_ = false;
  bool has_published_ = false;
  bool is_closing_ = false;
  NamedThread spiller_;  // offers later what could not be, or need not be, offered at once
};

}  // namespace p2pkv
