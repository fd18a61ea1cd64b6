#include "disk/tier.h"

#include <algorithm>
#include <utility>

#include "disk/promotions.h"
#include "disk/waiting.h"
#include "page/packed_location.h"

namespace p2pkv {
namespace {

using disk::CatalogEntry;
using disk::DiskStore;
using disk::ReadStatus;

// Pages pinned and queued together.
constexpr size_t kBatch = 64;
// Longer than a healthy disk takes for a full queue; when it ends the writer finds other bytes, or the same.
constexpr double kPinSeconds = 60;
// How soon pages are offered again that the disk's queue had no room for.
constexpr double kSpillSeconds = 0.02;
constexpr size_t kSpillPages = 4096;
// How often it is looked whether the disk has room for what was left out: its queue is half full after each
// look, which a disk of 2 GB/s writes in three of them.
constexpr double kCatchUpSeconds = 0.005;
constexpr double kIdleSeconds = 60;
// Keys of pages that were left out of the queue: 10 MiB of memory and more.
constexpr size_t kMaxBacklog = 1 << 18;
// Pages taken back one by one before there is a disk; beyond that everything on it is. A guess.
constexpr size_t kMaxEarly = 1 << 16;

}  // namespace

std::shared_ptr<Tier> Tier::start(std::shared_ptr<Pool> pool, const TierOptions& options) {
  std::shared_ptr<Tier> tier(new Tier(std::move(pool), options), DeleteUnlessForked<Tier>{});
  if (!tier->promotions_->start()) return nullptr;
  const auto run = options.write == WritePolicy::kOnEvict ? &Tier::spill_all : &Tier::catch_up;
  return tier->spiller_.start("p2pkv-spill", [self = tier.get(), run] { (self->*run)(); }) ? tier : nullptr;
}

Tier::Tier(std::shared_ptr<Pool> pool, const TierOptions& options)
    : pool_(std::move(pool)),
      options_(options),
      uses_(options.admission == Admission::kSecondUse ? std::make_unique<UseSketch>() : nullptr),
      backlog_(kMaxBacklog),
      promotions_(std::make_unique<Promotions>(*pool_, options.warm_rate, &counters_)) {}

Tier::~Tier() {
  close();
}

void Tier::attach(std::shared_ptr<DiskStore> store) {
  const std::lock_guard lock(mutex_);
  if (owned_store_) return;
  // what was taken back while the disk was not there was of no use to anybody, and must stay so
  if (is_all_early_) store->clear();
  store->forget(early_.data(), early_.size());
  early_ = {};
  if (is_closing_) return;
  owned_store_ = std::move(store);
  store_.store(owned_store_.get(), std::memory_order_release);
  promotions_->attach(owned_store_.get());
}

void Tier::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  published_.notify_all();
  spiller_.join();
  promotions_->close();
}

// --- to the disk

void Tier::note_published(const Key* keys, size_t n) {
  std::vector<Key> admitted;
  if (uses_) {
    for (size_t i = 0; i < n; ++i) {
      if (uses_->note(keys[i])) admitted.push_back(keys[i]);
    }
    keys = admitted.data();
    n = admitted.size();
  }
  if (options_.write == WritePolicy::kWriteThrough) {
    std::vector<Key> left;
    offer(keys, n, queue_limit(), &left);
    if (left.empty()) return;
    counters_.skipped_pages += left.size();
    if (!backlog_.add(left)) return;  // it is looked at anyway
  }
  {
    const std::lock_guard lock(mutex_);
    has_published_ = true;
  }
  published_.notify_one();
}

Tier::StoredListener Tier::stored_listener() const {
  return [pool = pool_, changed = promotions_->changed()](const Key* keys, size_t n) {
    std::vector<uint8_t> found(n);
    std::vector<Location> locations(n);
    pool->lookup(keys, n, found.data(), locations.data());
    std::vector<Key> evicted;
    for (size_t i = 0; i < n; ++i) {
      if (found[i] == 0) evicted.push_back(keys[i]);
    }
    if (evicted.empty()) return;
    changed->push(evicted.data(), evicted.size());
    pool->wake_drainer();
  };
}

uint64_t Tier::queue_limit() const {
  return std::min(options_.queue_size, pool_->data_nbytes() / 4);
}

// Has the disk's queue filled up to the limit. Returns how many were taken; `left` may be offered again.
size_t Tier::offer(const Key* keys, size_t n, uint64_t limit, std::vector<Key>* left) {
  DiskStore* const disk = store();
  if (disk == nullptr || n == 0) return 0;
  const uint64_t queued = disk->queued_bytes();
  uint64_t room = limit - std::min(limit, queued);
  std::vector<uint8_t> known(n);
  std::vector<CatalogEntry> entries(n);
  disk->look_up(keys, n, known.data(), entries.data());
  forget_older(*disk, entries, known.data());
  size_t n_taken = 0;
  std::vector<Key> batch;
  for (size_t i = 0; i < n; ++i) {
    if (known[i] == 0) batch.push_back(keys[i]);
    if (batch.size() < kBatch && i + 1 < n) continue;
    if (room == 0) {
      left->insert(left->end(), batch.begin(), batch.end());
    } else if (!batch.empty()) {
      n_taken += write_pinned(*disk, batch, &room, left);
    }
    batch.clear();
  }
  return n_taken;
}

// What the pool has under a key counts: a page on disk with other bytes is an earlier one.
void Tier::forget_older(DiskStore& disk, const std::vector<CatalogEntry>& entries, uint8_t* known) {
  std::vector<Key> keys;
  std::vector<size_t> rows;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (known[i] == 0) continue;
    keys.push_back(entries[i].key);
    rows.push_back(i);
  }
  std::vector<uint8_t> found(keys.size());
  std::vector<Location> locations(keys.size());
  pool_->lookup(keys.data(), keys.size(), found.data(), locations.data());
  for (size_t i = 0; i < keys.size(); ++i) {
    const disk::Place& place = entries[rows[i]].place;
    const bool is_same = locations[i].checksum == place.checksum && locations[i].length == place.length;
    if (found[i] == 0 || is_same) continue;
    disk.forget(&keys[i], 1);
    known[rows[i]] = 0;
  }
}

// Gives the pins of other nodes' pages back, as if they were not there; of those too that were taken back
// since they were pinned, which are no guests any more, and were not forgotten here: the pool is looked up
// after the guests, who forget a page and take it out of the pool in one step.
void Tier::leave_out_guests(const std::vector<Key>& keys, const std::vector<Location>& locations,
                            std::vector<uint8_t>* found, std::vector<uint64_t>* tickets) {
  if (options_.guests == nullptr || !options_.guests->is_used()) return;
  std::vector<uint8_t> is_guest(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    is_guest[i] = (*found)[i] != 0 && options_.guests->has(keys[i], locations[i].generation);
  }
  std::vector<uint8_t> there(keys.size());
  std::vector<Location> now(keys.size());
  pool_->lookup(keys.data(), keys.size(), there.data(), now.data());
  for (size_t i = 0; i < keys.size(); ++i) {
    const bool is_the_same = there[i] != 0 && now[i].generation == locations[i].generation;
    if ((*found)[i] == 0 || (is_guest[i] == 0 && is_the_same)) continue;
    uint8_t held = 0;
    pool_->unpin(&(*tickets)[i], 1, &held);
    (*found)[i] = 0;
  }
}

// Returns how many were taken; `left` gets those that there was no room for, in the queue or in the pool's
// pins.
size_t Tier::write_pinned(DiskStore& disk, const std::vector<Key>& keys, uint64_t* room,
                          std::vector<Key>* left) {
  const size_t n = keys.size();
  std::vector<uint8_t> found(n);
  std::vector<uint64_t> tickets(n);
  std::vector<Location> locations(n);
  const uint64_t since = disk.now();
  pool_->pin(keys.data(), n, kPinSeconds, found.data(), tickets.data(), locations.data());
  leave_out_guests(keys, locations, &found, &tickets);
  std::vector<Key> offered;
  std::vector<Key> unpinned;
  std::vector<Piece> pages;
  std::vector<uint64_t> lengths;
  std::vector<uint64_t> checksums;
  std::vector<uint64_t> pins;
  std::vector<uint64_t> given_back;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t nbytes = stored_nbytes(locations[i]);
    if (found[i] == 0) {
      unpinned.push_back(keys[i]);
    } else if (nbytes > *room) {
      *room = 0;  // later pages must not overtake: the front of a prefix matters most
      if (nbytes <= std::min(queue_limit(), disk.largest_page())) left->push_back(keys[i]);
      given_back.push_back(tickets[i]);
    } else {
      *room -= nbytes;
      offered.push_back(keys[i]);
      pages.push_back({reinterpret_cast<int64_t>(pool_->region().base() + locations[i].offset),
                       static_cast<int64_t>(nbytes)});
      lengths.push_back(locations[i].length);
      checksums.push_back(locations[i].checksum);
      pins.push_back(tickets[i]);
    }
  }
  std::vector<uint8_t> accepted(offered.size());
  disk.write(
      {offered.size(), offered.data(), pages.data(), lengths.data(), checksums.data(), pins.data(), since},
      accepted.data());
  size_t n_taken = 0;
  const bool is_suspended = disk.health().is_suspended;
  for (size_t i = 0; i < offered.size(); ++i) {
    n_taken += accepted[i];
    if (accepted[i] != 0) continue;
    given_back.push_back(pins[i]);
    // somebody else's pages were faster
    const bool is_small = static_cast<uint64_t>(pages[i].nbytes) <= disk.largest_page();
    if (is_small && !is_suspended) left->push_back(offered[i]);
  }
  std::vector<uint8_t> held(given_back.size());
  pool_->unpin(given_back.data(), given_back.size(), held.data());
  keep_present(unpinned, left);
  return n_taken;
}

// Adds to `left` those pages without a pin that are in the pool and so can wait for one. The others were
// evicted or taken back, or are not to be written.
void Tier::keep_present(const std::vector<Key>& keys, std::vector<Key>* left) {
  std::vector<uint8_t> found(keys.size());
  std::vector<Location> locations(keys.size());
  pool_->lookup(keys.data(), keys.size(), found.data(), locations.data());
  for (size_t i = 0; i < keys.size(); ++i) {
    const bool is_guest =
        found[i] != 0 && options_.guests != nullptr && options_.guests->has(keys[i], locations[i].generation);
    if (found[i] != 0 && !is_guest) left->push_back(keys[i]);
  }
}

// Offers what is evicted next, so that it is on disk by the time it must go. Eviction itself never waits.
void Tier::spill_all() {
  const uint64_t ahead = queue_limit();
  bool is_behind = false;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      const auto is_wanted = [this] { return has_published_ || is_closing_; };
      disk::wait_until(published_, lock, Deadline::after(is_behind ? kSpillSeconds : 1), is_wanted);
      if (is_closing_) return;
      has_published_ = false;
    }
    const PoolStats stats = pool_->stats();
    if (stats.used + ahead < stats.capacity) continue;
    std::vector<Key> oldest;
    pool_->list_oldest(kSpillPages, ahead, &oldest);
    if (uses_) std::erase_if(oldest, [this](const Key& key) { return !uses_->was_used_twice(key); });
    std::vector<Key> left;
    offer(oldest.data(), oldest.size(), ahead, &left);
    counters_.skipped_pages += left.size();
    is_behind = !left.empty();
  }
}

// Offers what was left out of a full queue, when the disk has written most of that: publishers come first.
void Tier::catch_up() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      const auto is_wanted = [this] { return has_published_ || is_closing_; };
      const bool is_behind = backlog_.size() > 0;
      const Deadline next = Deadline::after(is_behind ? kCatchUpSeconds : kIdleSeconds);
      disk::wait_until(published_, lock, next, [&] { return is_closing_ || (!is_behind && is_wanted()); });
      if (is_closing_) return;
      has_published_ = false;
    }
    counters_.caught_up_pages += catch_up_once();
  }
}

// Returns how many pages the disk took.
size_t Tier::catch_up_once() {
  DiskStore* const disk = store();
  const uint64_t limit = queue_limit();
  if (disk == nullptr || disk->queued_bytes() > limit / 4 || disk->health().is_suspended) return 0;
  std::vector<Key> left;
  size_t n_taken = 0;
  // not more than is urgent to nobody: the writer waits for a publisher's pause
  while (left.empty()) {
    const std::vector<Key> keys = backlog_.take(kBatch);
    if (keys.empty()) break;
    n_taken += offer(keys.data(), keys.size(), limit / 2, &left);
  }
  if (n_taken == 0 && !left.empty() && disk->queued_bytes() == 0) {
    // a page that needs more than half of the queue
    std::vector<Key> again;
    n_taken += offer(left.data(), left.size(), limit, &again);
    left = std::move(again);
  }
  backlog_.settle(left);
  return n_taken;
}

// --- from the disk

void Tier::locate(const Key* keys, size_t n, uint8_t* found, Location* locations) {
  pool_->lookup(keys, n, found, locations);
  DiskStore* const disk = store();
  if (disk == nullptr) return;
  std::vector<uint8_t> stored(n);
  std::vector<CatalogEntry> entries(n);
  disk->look_up(keys, n, stored.data(), entries.data());
  name_stored(stored, entries, found, locations);
}

void Tier::locate_at_once(const Key* keys, size_t n, uint8_t* found, Location* locations) {
  DiskStore* const disk = store();
  if (disk == nullptr || std::find(found, found + n, uint8_t{0}) == found + n) return;
  std::vector<uint8_t> stored(n);
  std::vector<CatalogEntry> entries(n);
  if (disk->try_look_up(keys, n, stored.data(), entries.data())) {
    name_stored(stored, entries, found, locations);
  }
}

void Tier::name_stored(const std::vector<uint8_t>& stored, const std::vector<CatalogEntry>& entries,
                       uint8_t* found, Location* locations) const {
  for (size_t i = 0; i < stored.size(); ++i) {
    if (found[i] != 0 || stored[i] == 0) continue;
    found[i] = 1;
    locations[i] = Location{};
    locations[i].owner = options_.owner;
    locations[i].boot = boot_;
    locations[i].length = entries[i].place.length;
    locations[i].checksum = entries[i].place.checksum;
  }
}

void Tier::contains(const Key* keys, size_t n, uint8_t* found) {
  std::fill(found, found + n, uint8_t{0});
  if (DiskStore* const disk = store()) disk->contains(keys, n, found);
}

void Tier::read(const disk::ReadBatch& batch, const Deadline& deadline, ReadStatus* statuses) {
  std::fill(statuses, statuses + batch.n_pages, ReadStatus::kMiss);
  if (DiskStore* const disk = store()) disk->read(batch, deadline, statuses);
}

void Tier::promote(std::vector<Key> keys, Lease lease, Deadline answer_by, Done done) {
  promotions_->ask(std::move(keys), lease, answer_by, std::move(done));
}

void Tier::release(uint64_t lease) {
  promotions_->release(lease);
}

void Tier::leave(uint64_t asker) {
  promotions_->leave(asker);
}

std::vector<Key> Tier::drain_changed(size_t max) {
  return promotions_->drain(max);
}

void Tier::forget(const Key* keys, size_t n) {
  if (store() == nullptr && remember(keys, n)) return;
  store()->forget(keys, n);
  promotions_->wait_committed();
}

void Tier::clear() {
  backlog_.clear();
  if (store() == nullptr && remember(nullptr, 0)) return;
  store()->clear();
  promotions_->wait_committed();
}

bool Tier::wait_cleared(const Deadline& deadline) {
  DiskStore* const disk = store();
  return disk != nullptr && disk->wait_recalled(deadline);
}

// Keeps for the store what is taken back before there is one, or everything with null; false if there is one.
bool Tier::remember(const Key* keys, size_t n) {
  const std::lock_guard lock(mutex_);
  if (owned_store_) return false;
  is_all_early_ = is_all_early_ || keys == nullptr || early_.size() + n > kMaxEarly;
  if (is_all_early_) {
    early_ = {};
  } else {
    early_.insert(early_.end(), keys, keys + n);
  }
  return true;
}

}  // namespace p2pkv
