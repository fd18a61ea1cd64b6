// How pages lie on disk: the interface of the three layouts.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "disk/catalog.h"
#include "disk/io.h"
#include "disk/options.h"
#include "disk/record.h"

namespace p2pkv::disk {

// Records on their way to disk, made by the writer: headers and pages in one aligned buffer, each record at a
// multiple of the layout's alignment, zeros between and behind them up to a whole block.
class Chunk : public IoBatch {
 public:
  struct Record {
    Key key;
    uint64_t checksum;
    uint32_t length;     // of the page
    uint32_t stored;     // see RecordHeader
    uint64_t at;         // in the buffer
    uint64_t since = 0;  // see CatalogEntry
  };
  Arena::Buffer buffer;
  uint64_t nbytes = 0;
  std::vector<Record> records;
  std::vector<CatalogEntry> entries;  // the layout's: where they go
};

// What a layout works with; all of it outlives the layout.
struct Backing {
  Files& files;
  IoEngine& io;
  Catalog& catalog;
  Recalls& recalls;
  DiskCounters& counters;
  const DiskOptions& options;
  std::string path;
  Stamp stamp;
  bool is_direct;     // O_DIRECT works here
  uint64_t overhead;  // of the capacity, see below
  const std::atomic<bool>& is_stopping;
  // The folder may be somebody else's by now: nothing in it is deleted until it is known that it is not.
  const std::atomic<bool>& is_lost;
};

// Bytes of the capacity kept for the store's file, the lock, the probe, what was taken back and the folders.
constexpr uint64_t kOverhead = 128 << 10;

// `recover` runs after `open`, the first time on a thread of its own; `locate` on any; everything else on the
// writer's. Errors are
// -errno; -ENOBUFS means that there is no room because of readers, and nothing is wrong with the disk.
class Layout {
 public:
  explicit Layout(Backing backing) : disk_(std::move(backing)) {}
  virtual ~Layout() = default;

  // Looks at what is there, without reading it; empty, or a sentence saying what is in the way.
  virtual std::string open() = 0;
  // Adds what is there to the catalog and removes what is damaged, half-written or nobody's. 0 or -errno:
  // then it could not see all that is there, and is to be called again for the rest.
  virtual int recover() = 0;
  // Whether nothing can be placed before `recover` is over.
  virtual bool recovers_first() const { return false; }

  virtual uint64_t alignment() const = 0;
  virtual uint64_t largest_page() const = 0;
  // Whether chunks under way must be finished before this one may begin.
  virtual bool must_settle_before(const Chunk& chunk) const { return false; }
  // Finds room, evicting, and submits the writes.
  virtual int begin(const std::shared_ptr<Chunk>& chunk) = 0;
  // After the writes are done: makes the pages visible, or gives their room back.
  virtual int finish(Chunk& chunk) = 0;
  // Whether the next chunk could begin: takes the room it would need. 0 or -errno.
  virtual int prepare() { return 0; }
  // Forces what was finished to the device.
  virtual int sync() = 0;
  // Above the orders of all records that were begun, and not above those of later ones. Where recovery comes
  // first it must be over.
  virtual uint64_t next_order() const = 0;
  // No record that was taken back and is still on disk has a smaller one.
  virtual uint64_t oldest_order() const { return disk_.catalog.has_retired() ? 0 : next_order(); }
  // Makes the next start quick.
  virtual int seal() { return 0; }
  // All units are about to be retired: what is being written takes no more.
  virtual void abandon() {}
  // Forgets what it has open: the files were deleted. `open` follows.
  virtual void reset() = 0;

  // The second phase of eviction: deletes the units that nobody holds any more. Waits for one at most until
  // the deadline.
  void delete_due(const Deadline& deadline);
  // Where to read the record at `place`: descriptor or path, and where in it.
  virtual void locate(const Key& key, const Place& place, IoOp* op) const = 0;

 protected:
  // Deletes the bytes; errors leave an orphan for the next start.
  virtual void remove(const Unit& unit) = 0;
  // Evicts until `nbytes` more fit into the capacity; 0 or -ENOBUFS.
  int make_room(uint64_t nbytes);
  int evict_one();
  bool must_sync(FsyncPolicy least) const { return disk_.options.fsync >= least; }
  int open_data(const std::string& path, int flags) const;

  Backing disk_;
};

std::unique_ptr<Layout> bucket_layout(Backing backing);
std::unique_ptr<Layout> file_layout(Backing backing);
std::unique_ptr<Layout> offset_layout(Backing backing);

// Memory as O_DIRECT wants it, for what is no page.
class AlignedBytes {
 public:
  explicit AlignedBytes(uint64_t nbytes);
  uint8_t* data() const { return bytes_.get(); }
  uint64_t nbytes() const { return nbytes_; }

 private:
  struct Free {
    void operator()(uint8_t* bytes) const { std::free(bytes); }
  };
  uint64_t nbytes_;
  std::unique_ptr<uint8_t[], Free> bytes_;
};

}  // namespace p2pkv::disk
