// Recalls keep what was taken back, by key or all at once, and when: in this run, and in the runs before.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/fd.h"
#include "disk/files.h"
#include "disk/record.h"
#include "page/location.h"

namespace p2pkv::disk {

// Thread-safe. Two measures of time:
//  - `now` grows with every retraction and every clear. What is on its way to the disk or from it (a pin, a
//  page in the queue, a page being loaded) carries the number from before anybody looked at its bytes, and
//  `is_recalled` says whether they were taken back since.
//  - A record on disk has an order instead (`order_of`), and `is_void` says whether it is older than what
//  took its key back. That is kept in the file `recalls` (docs/disk.md), so that it holds in the next run
//  too.
// Where this forgets, for lack of room, more counts as taken back than was: a doubt is a miss.
class Recalls {
 public:
  // Above the order of every record: for what was taken back before anybody knows what there is.
  static constexpr uint64_t kEverything = ~uint64_t{0};

  // Reads what earlier runs took back, or makes the file; 0 or -errno. Damage says that nobody knows, so all
  // counts as taken back; then `is_damaged`.
  int open(Files& files, const std::string& path, const Stamp& stamp, uint64_t max_nbytes, bool* is_damaged);

  uint64_t now() const;
  bool is_recalled(const Key& key, uint64_t since) const;
  bool is_void(const Key& key, uint64_t order) const;
  // Above the orders before which something is void: new records begin here.
  uint64_t highest() const;

  void recall(const Key* keys, size_t n);
  void recall_all();
  // A record of this key may lie on disk, so that its being taken back has to be written.
  void keep(const Key& key);

  // The number of the last clear.
  uint64_t cleared() const;
  // Grows with whatever has to be written.
  uint64_t n_kept() const;
  // Whether something is not written yet.
  bool is_pending() const;

  // --- the writer, alone
  // Writes what is pending: it holds for all records below `order`. None below `oldest` is left on disk. 0 or
  // -errno; -ENOBUFS: more was taken back than the file has room for.
  int write(uint64_t order, uint64_t oldest);
  // Writes the file anew: it was deleted.
  int restore();
  void close() { fd_.reset(); }
  int sync() { return fd_ ? files_->sync(fd_.get()) : 0; }

 private:
  struct Recall {
    uint64_t number;
    uint64_t before = 0;  // records with a smaller order are void; 0: there are none
  };
  // In the file; docs/disk.md.
  struct Header {
    uint32_t magic;
    uint16_t version;
    uint16_t reserved;
    Stamp stamp;
    uint64_t check;
  };
  struct Entry {
    Key key;  // zeros: all
    uint64_t before;
    uint64_t check;
  };
  static_assert(sizeof(Header) == 32 && sizeof(Entry) == 32);

  static Entry entry_of(const Key& key, uint64_t before);
  bool parse(const std::string& content);
  int replace();
  int append(const std::vector<Entry>& entries);
  // With the lock.
  std::vector<Entry> take_pending(uint64_t order);
  bool prune(uint64_t order, uint64_t oldest);
  void make_room();

  Files* files_ = nullptr;
  std::string path_;
  Stamp stamp_{};
  uint64_t max_entries_ = 0;
  UniqueFd fd_;             // the writer's, as is the next
  uint64_t n_entries_ = 0;  // in the file

  mutable std::mutex mutex_;  // guards all below
  uint64_t now_ = 1;
  uint64_t n_kept_ = 0;
  uint64_t floor_ = 0;  // what began before counts as taken back
  Recall all_{0};
  bool is_all_pending_ = false;
  bool has_open_ends_ = false;  // something in the file is void whatever its order
  std::unordered_map<Key, Recall, KeyHash> keys_;
  std::vector<Key> pending_;
};

}  // namespace p2pkv::disk
