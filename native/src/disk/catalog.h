// What the disk holds: the index of keys, the units that are evicted as one, and the bytes they occupy.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "disk/key_log.h"
#include "disk/recalls.h"
#include "disk/record.h"
#include "page/change_log.h"
#include "page/location.h"

namespace p2pkv::disk {

// Which unit goes first when room is needed. Mirrors `EVICTION` in p2pkv/disk/store.py.
enum class EvictionOrder : uint8_t { kOldest = 0, kLeastRecentlyRead = 1 };

// What is evicted and deleted whole: a segment, a page's file, a page's extent. The catalog guards all but
// `id` to `fd`, which never change while anybody holds the unit.
struct Unit {
  uint64_t id = 0;
  uint64_t offset = 0;  // of an extent in its file
  uint64_t slot = 0;    // of its metadata
  uint64_t order = 0;   // of what lies at its beginning, see `order_of`; set before its pages are visible
  Key key{};            // of the only page in it
  UniqueFd fd;          // of a segment; read and written without the lock
  uint64_t nbytes = 0;  // on disk
  std::vector<Key> keys;
  uint32_t n_holds = 0;
  bool is_open = false;   // being written, so not to be evicted
  bool is_fixed = false;  // no pages: only what it occupies counts
  bool is_retired = false;
  bool is_unread = false;  // pages may lie in it that the index does not know of
  std::list<std::unique_ptr<Unit>>::iterator position;
};

// Where a page lies.
struct Place {
  Unit* unit = nullptr;
  uint64_t offset = 0;  // of the record in the unit's file
  uint64_t checksum = 0;
  uint32_t length = 0;  // of the page
  uint32_t stored = 0;  // bytes behind the record's header at most; 0: the page as it is
};

// Orders the records of a key: the one with the larger order is the younger.
constexpr uint64_t order_of(const Place& place) {
  return place.unit->order + place.offset / kRecordAlign;
}

struct CatalogEntry {
  Key key;
  Place place;
  uint64_t since = 0;  // of a page that was written: `Recalls::now` before its bytes were looked at
};

enum class Source : uint8_t { kWritten, kRecovered };

// Thread-safe. Eviction has two phases: `retire` takes a unit's pages out of the index and logs their keys in
// one batch; when the last hold is gone, `take_deletable` hands the unit to the writer, whose layout deletes
// its bytes. Those count until `forget`.
class Catalog {
 public:
  // `changed` is called, without the lock, when keys can be drained. `changes` may be null.
  Catalog(EvictionOrder order, size_t keys_logged, Recalls& recalls, std::function<void()> changed,
          std::shared_ptr<ChangeLog> changes)
      : order_(order),
        recalls_(recalls),
        changed_(std::move(changed)),
        changes_(std::move(changes)),
        dropped_(keys_logged),
        recovered_(keys_logged) {}

  // --- readers
  void contains(const Key* keys, size_t n, uint8_t* found);
  // Only key, length and checksum of the entries may be used: nothing is held.
  void look_up(const Key* keys, size_t n, uint8_t* found, CatalogEntry* entries);
  // Does the same unless somebody has the lock, as who clears a large store has for long: then false.
  bool try_look_up(const Key* keys, size_t n, uint8_t* found, CatalogEntry* entries);
  // Appends at most `max` keys from `cursor` on (0: the beginning), oldest unit first; returns the next
  // cursor, 0 at the end. What is there throughout is listed.
  uint64_t list(uint64_t cursor, size_t max, std::vector<Key>* keys);
  // Takes pages out, whatever they are. `had`: 1 where there was one.
  void forget_keys(const Key* keys, size_t n, uint8_t* had);
  void forget_all_keys();
  // Where the pages are (unit null: nowhere), each with a hold on its unit. Counts as a read of it.
  void hold_pages(const Key* keys, size_t n, Place* places);
  void release(Unit* unit);
  // Takes out a page that turned out bad, unless the key is somewhere else by now: then false.
  bool drop(const Key& key, const Place& place);
  std::vector<Key> drain_dropped(size_t max, const Deadline& deadline) {
    return dropped_.drain(max, deadline);
  }
  // Pages found by recovery that are still there.
  std::vector<CatalogEntry> drain_recovered(size_t max, const Deadline& deadline);
  void close();

  // --- the writer and recovery
  // It counts from now on, and is the youngest. May be evicted at once unless it is open.
  Unit* add_unit(std::unique_ptr<Unit> unit);
  // Ends its being open; one in which no page is left is retired.
  void admit(Unit* unit);
  void resize(Unit* unit, uint64_t nbytes);
  // Null if it is gone.
  Unit* hold_unit(uint64_t id);
  // Makes pages visible. Of two with one key the younger counts, whichever comes first: recovery and the
  // writer work side by side. What was taken back stays out. Returns how many keys lead to these pages now
  // and did not lead to their units before.
  size_t add(const CatalogEntry* entries, size_t n, Source source);

  // The first phase for the unit whose turn it is; false when none may go.
  bool retire_next();
  void retire(Unit* unit);
  void retire_all();
  // Lets go of everything, files on disk excepted. Nobody may hold anything.
  void clear();
  // The units whose second phase is due. Waits for one until the deadline while some are held.
  std::vector<Unit*> take_deletable(const Deadline& deadline);
  void forget(Unit* unit);

  // Not all that lies in the unit could be read.
  void note_unread(Unit* unit);
  // Whether pages may lie in some unit that nobody could read.
  bool has_unread() const;
  // Whether bytes of pages that are gone are still to be deleted.
  bool has_retired() const;
  // The smallest order of any unit whose bytes are there; `otherwise` without any.
  uint64_t oldest_order(uint64_t otherwise) const;
  uint64_t used() const;
  uint64_t n_pages() const;
  uint64_t n_evicted() const { return n_evicted_; }
  uint64_t n_lost_keys() const { return dropped_.n_lost() + recovered_.n_lost(); }

 private:
  using Lock = std::lock_guard<std::mutex>;
  using Units = std::list<std::unique_ptr<Unit>>;

  void log(KeyLog& log, const std::vector<Key>& keys);
  // With the lock.
  void look_up_locked(const Key* keys, size_t n, uint8_t* found, CatalogEntry* entries) const;
  void retire_locked(Unit* unit, std::vector<Key>* gone, PageEvent why = PageEvent::kEvictedFromDisk);
  void note(const Key& key, PageEvent event);

  const EvictionOrder order_;
  Recalls& recalls_;
  const std::function<void()> changed_;
  const std::shared_ptr<ChangeLog> changes_;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable deletable_;
  std::unordered_map<Key, Place, KeyHash> index_;
  std::map<uint64_t, Unit*> by_id_;
  Units live_;     // the next to go first
  Units retired_;  // waiting for their holds, or for deletion
  std::vector<Unit*> due_;
  uint64_t used_ = 0;
  size_t n_unread_ = 0;  // units whose bytes are there
  std::atomic<uint64_t> n_evicted_{0};
  KeyLog dropped_;
  KeyLog recovered_;
};

}  // namespace p2pkv::disk
