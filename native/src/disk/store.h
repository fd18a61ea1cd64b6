// The store of the disk tier: pages in, pages out, by the batch. docs/disk.md describes it from outside.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/thread.h"
#include "disk/folder.h"
#include "disk/layout.h"
#include "disk/options.h"
#include "page/location.h"

namespace p2pkv::disk {

// What became of one page of a read. Mirrors ReadStatus in p2pkv/disk/store.py.
enum class ReadStatus : uint8_t {
  kMiss = 0,  // not there, or a bad record, or the disk failed
  kHit = 1,
  kOtherLength = 2,
  kTimedOut = 3,
};

// Pages to be written; all borrowed for the call but for the memory the pieces describe.
struct WriteBatch {
  size_t n_pages;
  const Key* keys;
  const Piece* pages;       // each as it is, or in its packed form, which is shorter
  const uint64_t* lengths;  // of the pages themselves
  const uint64_t* checksums;
  const uint64_t* tickets;  // handed to `release`
  uint64_t since;           // `now` before anybody looked whether these are the pages to be written
};

// Pages to be read, each of as many pieces; all borrowed for the call.
struct ReadBatch {
  // A page that was found: `packed` bytes of its packed form are kept of it; 0: it is kept as it is.
  struct Found {
    uint64_t length;
    uint64_t checksum;
    uint64_t packed;
  };

  size_t n_pages;
  size_t n_pieces;
  const Key* keys;
  const Piece* pieces;
  // If set, there are no pieces, and pages of whatever length are read as they are kept: it says to where,
  // with room for them; null: nowhere, so that the page is missed. Called once a page at most, by the thread
  // that reads.
  std::function<uint8_t*(size_t page, const Found& found)> place = nullptr;
};

struct DiskHealth {
  bool is_suspended = false;  // writes are refused; the store tries by itself to come back
  bool is_unreadable = false;
  std::string reason;
};

// Thread-safe. Two threads of its own: one writes, one recovers and ends; and those of the I/O engine.
// Nothing that a caller does waits for the disk but `read`, `flush` and `close`, each until its deadline.
//
// Promises: a hit is exactly the bytes of that key, checked against header, index and checksum after the last
// byte was read; the folder never exceeds the capacity; after `read` has returned nobody writes to the
// caller's memory; each accepted page's ticket is released exactly once.
class DiskStore {
 public:
  struct Dispose {
    pid_t pid = getpid();
    void operator()(DiskStore* store) const;
  };
  using Owner = std::unique_ptr<DiskStore, Dispose>;

  // Null, with a sentence saying why not. What an earlier run left is found in the background.
  static Owner open(const std::string& path, const DiskIdentity& identity, const DiskOptions& options,
                    std::string* error);
  ~DiskStore();

  // Queues pages; never blocks. `accepted`: 1 for those whose memory must stay until their release. A page of
  // which the bytes no longer have its checksum when its turn comes is not written.
  void write(const WriteBatch& batch, uint8_t* accepted);
  void contains(const Key* keys, size_t n, uint8_t* found);
  // What the index knows, whether or not the disk can be read now; only `key`, and of the place `length` and
  // `checksum`, say something. `found`: 1 where there is such a page.
  void look_up(const Key* keys, size_t n, uint8_t* found, CatalogEntry* entries) {
    catalog_.look_up(keys, n, found, entries);
  }
  // Does the same unless the index is locked, as it is for long while a large store is cleared: then false.
  bool try_look_up(const Key* keys, size_t n, uint8_t* found, CatalogEntry* entries) {
    return catalog_.try_look_up(keys, n, found, entries);
  }
  // Appends keys from `cursor` on (0: the beginning), `max` at most; returns the next cursor, 0 at the end.
  uint64_t list(uint64_t cursor, size_t max, std::vector<Key>* keys) {
    return catalog_.list(cursor, max, keys);
  }
  // Takes pages back, those on their way here with them: whatever carries a `now` from before. In the next
  // run they are not found either; their bytes go with what lies beside them. Never blocks.
  void forget(const Key* keys, size_t n);
  // Takes back all pages, and deletes their bytes soon. Never blocks.
  void clear();
  // Grows with whatever is taken back. What is brought here or from here carries it from before it was looked
  // at, and must not be used if `is_recalled` says that it was taken back since.
  uint64_t now() const { return recalls_.now(); }
  bool is_recalled(const Key& key, uint64_t since) const { return recalls_.is_recalled(key, since); }
  // Whether all that was taken back until now is written, so that the next run knows of it however this one
  // ends; waits for it.
  bool wait_recalled(const Deadline& deadline);
  // Only a hit says anything about the destination's bytes.
  void read(const ReadBatch& batch, const Deadline& deadline, ReadStatus* statuses);

  // Keys that are not here any more: evicted, or found bad.
  std::vector<Key> drain_dropped(size_t max, const Deadline& deadline) {
    return catalog_.drain_dropped(max, deadline);
  }
  // Pages an earlier run left, as they are found.
  std::vector<CatalogEntry> drain_recovered(size_t max, const Deadline& deadline) {
    return catalog_.drain_recovered(max, deadline);
  }
  bool is_recovered() const { return is_recovered_; }

  // Whether all that was accepted before is written (or lost to an error), and forced to the device unless
  // fsync is never.
  bool flush(const Deadline& deadline);
  // Writes what is queued until the deadline, seals and lets go of the folder. False if the disk hangs: then
  // threads, buffers and lock stay as they are for ever. Idempotent.
  bool close(const Deadline& deadline);

  DiskHealth health() const;
  const DiskCounters& counters() const { return counters_; }
  uint64_t capacity() const { return options_.capacity; }
  // Returns how many bytes a page may have; a larger one is refused whatever room there is.
  uint64_t largest_page() const { return largest_page_; }
  uint64_t used() const { return catalog_.used() + overhead_; }
  uint64_t n_pages() const { return catalog_.n_pages(); }
  uint64_t queued_bytes() const;
  uint64_t n_evicted() const { return catalog_.n_evicted(); }
  uint64_t n_lost_keys() const { return catalog_.n_lost_keys(); }
  const std::string& io_name() const { return io_name_; }
  bool is_direct() const { return is_direct_; }

 private:
  struct Pending {
    Key key;
    const uint8_t* page;
    uint32_t nbytes;  // there
    uint32_t length;  // of the page: if it is another, it lies there in its packed form
    uint64_t checksum;
    uint64_t ticket;
    Deadline::Clock::time_point queued_at;
    uint64_t since;
  };
  // Between attempts to come back after an error; a guess.
  static constexpr double kLongestBackoff = 30;

  class ReadJob;
  class Reading;
  class Call;

  explicit DiskStore(const DiskOptions& options)
      : options_(options),
        catalog_(options.eviction, options.keys_logged, recalls_, options.changed, options.changes) {}

  // store.cc
  std::string start(const std::string& path, const DiskIdentity& identity);
  bool probe_direct(std::string* error);
  std::string open_recalls();
  bool start_threads();
  void recover();
  void end_thread();

  // store_writer.cc, on the writer's thread
  void write_all();
  bool wait_for_work(std::vector<Pending>* batch);
  bool is_urgent() const;
  Deadline::Clock::time_point next_work(Deadline::Clock::time_point otherwise) const;
  bool is_queue_empty();
  bool is_refusing() const { return health_.is_suspended || !unseen_.empty(); }  // with the lock
  bool may_place() const { return is_recovered_ || !layout_->recovers_first(); }
  void discard(const std::vector<Pending>& batch);
  std::shared_ptr<Chunk> fill(const std::vector<Pending>& batch);
  bool copy_pending(const Pending& page, uint8_t* to);
  uint8_t* copy_of(size_t nbytes);
  void encode(const uint8_t* page, RecordHeader* header, uint8_t* payload);
  void put(const std::shared_ptr<Chunk>& chunk);
  void finish_oldest();
  void finish_all();
  void settle(size_t n_pages, uint64_t nbytes);
  void flush_layout();
  void suspend(const char* what, int error);
  bool must_probe();
  void try_to_resume();
  void look_after_folder();
  int probe();
  bool is_folder_intact();
  int restore_folder();
  void let_go_of_folder();

  // store_recalls.cc; all but the first on the writer's thread
  void wake_writer();
  void record_recalls();
  int write_recalls();
  void drop_cleared();
  void leave_nothing_recalled();

  // store_read.cc
  bool can_read();
  void drop_bad(const Key& key, const Place& place);
  void note_failed_read(int error);

  const DiskOptions options_;
  DiskCounters counters_;
  Recalls recalls_;
  Catalog catalog_;
  std::unique_ptr<Folder> folder_;
  std::unique_ptr<Arena> read_arena_;
  std::unique_ptr<Arena> write_arena_;
  std::unique_ptr<IoEngine> io_;
  std::unique_ptr<Layout> layout_;
  std::string io_name_;
  uint64_t largest_page_ = 0;
  uint64_t chunk_nbytes_ = 0;
  uint64_t overhead_ = kOverhead;
  bool is_direct_ = false;
  std::atomic<bool> is_stopping_{false};
  std::atomic<bool> is_recovered_{false};
  std::atomic<bool> is_lost_{false};         // see Backing
  std::atomic<uint32_t> n_failed_reads_{0};  // in a row

  mutable std::mutex mutex_;          // guards all below but the last part
  std::condition_variable wanted_;    // the writer waits
  std::condition_variable finished_;  // flushes and close wait
  std::deque<Pending> queue_;
  uint64_t queued_bytes_ = 0;               // of the queue and of what the writer has in hand
  Deadline::Clock::time_point last_write_;  // call of `write`
  uint64_t n_accepted_ = 0;
  uint64_t n_settled_ = 0;
  uint64_t n_synced_ = 0;   // settled when the layout was last synced
  uint64_t n_written_ = 0;  // `Recalls::n_kept` when what is written of it was looked at
  bool wants_flush_ = false;
  bool is_closed_ = false;
  bool is_gone_ = false;  // closed, and everything let go
  size_t n_calls_ = 0;
  size_t n_threads_ = 0;
  DiskHealth health_;   // as the writer has it
  std::string unseen_;  // why nobody has seen yet all that is there, after an attempt to

  // The writer's own.
  std::unique_ptr<PageEncoder> encoder_;  // null: pages are written as they are
  std::vector<uint8_t> copy_;             // of a page, from which it is encoded
  std::deque<std::shared_ptr<Chunk>> under_way_;
  uint64_t n_recorded_ = 0;    // `Recalls::n_kept` when the last attempt to write it began
  uint64_t dropped_at_ = 0;    // `Recalls::cleared` when all was dropped last
  bool must_restore_ = false;  // files were deleted, and not all is made again
  double backoff_ = 0;
  Deadline next_probe_ = Deadline::after(0);
  Deadline next_look_ = Deadline::after(0);

  NamedThread writer_;
  NamedThread scanner_;
};

}  // namespace p2pkv::disk
