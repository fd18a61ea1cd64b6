// The pool of another process of this host: a process that maps it read-only finds pages by its index, copies
// them out, and asks nobody.
//
// What a page's word proves holds here as everywhere (page/words.h), whoever writes to the pool meanwhile:
// its owner, nobody, since that has ended, or a successor that goes on with the memory, whose words go on
// above those of before.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/thread.h"
#include "page/region.h"
#include "page/vigil.h"
#include "pool/page_index.h"
#include "pool/page_record.h"
#include "pool/pool.h"

namespace p2pkv {

// A pool's region as it is mapped here. Several of what follows may have it: a successor's pool lies where
// its predecessor's did, and what of it is mapped in already stays so.
class MappedRegion {
 public:
  // Its device and its inode name a memfd while it is mapped.
  using Name = std::pair<uint64_t, uint64_t>;

  MappedRegion(std::unique_ptr<ReadOnlyMapping> mapping, Name name)
      : mapping_(std::move(mapping)), name_(name) {}
  // Unmaps a large one behind the caller's back: it may be the last who has the memory, which the kernel then
  // clears away, and may hold the interpreter's lock.
  ~MappedRegion();

  // Has a thread map all of it in ahead of its first use, if none has done so.
  void map_in();
  const uint8_t* base() const { return mapping_->base(); }
  size_t nbytes() const { return mapping_->nbytes(); }
  const Name& name() const { return name_; }

 private:
  std::shared_ptr<ReadOnlyMapping> mapping_;
  const Name name_;
  std::atomic<bool> is_over_{false};
  std::once_flag begun_;
  NamedThread thread_;
};

// Thread-safe: it is never written to.
class MappedPool {
 public:
  // Maps what a pool has; the descriptors stay the caller's. `known` is the region of an earlier one, if
  // there was one. Null, with the reason in `error`.
  static std::shared_ptr<MappedPool> map(int index, int records, int region,
                                         std::shared_ptr<MappedRegion> known, std::string* error);

  // What may be found. Guests' sources may have taken them back while their owner did not hear it.
  enum class Find : uint8_t { kOwn, kGuestsToo };

  // Copies out the pages that are there. What is not proven right is a miss, and so are pages of another
  // length, and guests unless they are asked for. A page whose copy has begun is copied to its end; the
  // others are given up at the deadline. `check_sums`: the bytes must have the page's checksum too. Returns
  // how many of the hits are guests.
  size_t fetch(const PageBatch& batch, bool check_sums, FetchStatus* statuses, const Deadline& deadline,
               Find what = Find::kOwn) const;
  // Says which pages are there, and where.
  void lookup(const Key* keys, size_t n, uint8_t* found, Location* locations, Find what = Find::kOwn) const;
  // The owner shows in this word (page/vigil.h) until when none of its guests was taken back. To be called
  // before others have the pool; without it none is ever believed.
  void find_guests_until(std::shared_ptr<const int64_t> word) { guests_until_ = std::move(word); }
  bool are_guests_believed() const { return guests_until_ && is_believed(*guests_until_); }
  uint64_t owner() const { return about_.owner; }
  uint64_t boot() const;
  bool is_kept() const { return about_.is_kept != 0; }
  const std::shared_ptr<MappedRegion>& region() const { return region_; }

 private:
  // A page that was there, under this word: what the record said then.
  struct Candidate {
    uint32_t granule;
    PageRecord record;
  };

  MappedPool(const PageIndexHeader& about, std::unique_ptr<ReadOnlyMapping> index,
             std::unique_ptr<ReadOnlyMapping> records, std::shared_ptr<MappedRegion> region);

  // Has what `find` will load of each key on its way from memory, since no cache has it in most cases: a
  // page's word and record are not waited for one after the other then.
  void prefetch(const Key* keys, size_t n) const;
  bool find(const Key& key, Find what, Candidate* found) const;
  bool is_there(const Candidate& page) const;
  bool copy_out(const PageBatch& batch, size_t i, const Candidate& page, bool check_sums) const;
  Location location_of(const Candidate& page) const;
  const uint32_t* head_of(const Key& key) const { return heads_ + (hash_of(key) & (about_.n_buckets - 1)); }
  const PageRecord* page_records() const {
    return reinterpret_cast<const PageRecord*>(records_->base() + kRecordsOffset);
  }
  const uint8_t* word_at(uint32_t granule) const {
    return region_->base() + size_t{granule} * sizeof(uint64_t);
  }

  const std::unique_ptr<ReadOnlyMapping> index_, records_;
  const std::shared_ptr<MappedRegion> region_;
  const PageIndexHeader
      about_;  // as it was when it was found to fit: its owner may yet write to it by mistake
  const uint64_t* const boot_;  // which alone changes
  const uint32_t* const heads_;
  const uint32_t* const next_;
  std::shared_ptr<const int64_t> guests_until_;  // null: no guest is believed
};

// Holds the mapped pool of this moment: another one when the owner has another one, none while there is none.
class CurrentMappedPool {
 public:
  std::shared_ptr<MappedPool> get() const {
    const std::lock_guard lock(mutex_);
    return pool_;
  }
  void set(std::shared_ptr<MappedPool> pool) {
    {
      const std::lock_guard lock(mutex_);
      pool_.swap(pool);
    }
    // What was there is unmapped by whoever lets go of it last, without the lock.
  }
  // Whether others tell the owner what they take back: it is a member to this process. It is one to begin
  // with.
  void set_member(bool is_member) { is_member_ = is_member; }
  // What may be found there now. A call that asks this after it has begun finds nothing that was taken back
  // before it began.
  MappedPool::Find findable(const MappedPool& pool) const {
    return is_member_ && pool.are_guests_believed() ? MappedPool::Find::kGuestsToo : MappedPool::Find::kOwn;
  }
  // These look up as `MappedPool` does, and find nothing while there is none: what may be found now, or what
  // is the owner's own.
  void lookup(const Key* keys, size_t n, uint8_t* found, Location* locations) const;
  void lookup_own(const Key* keys, size_t n, uint8_t* found, Location* locations) const;

 private:
  std::atomic<bool> is_member_{true};
  mutable std::mutex mutex_;
  std::shared_ptr<MappedPool> pool_;
};

}  // namespace p2pkv
