// The thread that brings pages from the disk into the pool: what readers wait for first, then what they may
// want.
#include <algorithm>

#include "disk/promotions.h"
#include "disk/waiting.h"
#include "page/packed_location.h"

namespace p2pkv {
namespace {

using disk::CatalogEntry;
using disk::ReadStatus;

// One read of the store takes no more, so that the first pages are there while the others are still read.
constexpr size_t kMaxPages = 64;
constexpr uint64_t kMaxBytes = 8 << 20;
// A disk that takes longer for one read counts as broken here.
constexpr double kReadSeconds = 2;
// While only pages wait that nobody waits for, and their time has not come.
constexpr double kWarmPause = 0.01;
// In which a part of the pool may be evicted for them: as long as a reader remembers that it saw them.
constexpr double kWarmSeconds = 10;

}  // namespace

// --- loading

void Promotions::load_all() {
  std::vector<Block> blocks;
  double lease_seconds = 0;
  while (take(&blocks, &lease_seconds)) fill(blocks, lease_seconds);
}

// With the lock.
bool Promotions::may_warm() {
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - warmed_).count();
  const auto share = static_cast<double>(pool_.data_nbytes() / kWarmPart);
  warm_bytes_ = std::min(warm_rate_, warm_bytes_ + seconds * warm_rate_);
  share_bytes_ = std::min(share, share_bytes_ + seconds * share / kWarmSeconds);
  warmed_ = now;
  return warm_bytes_ > 0;
}

// With the lock. Bytes of the pool that may be filled for nobody; `n_free` of them without evicting.
uint64_t Promotions::warm_room(uint64_t* n_free) {
  const PoolStats stats = pool_.stats();
  *n_free = stats.capacity - stats.used;
  return *n_free + static_cast<uint64_t>(std::max(0.0, share_bytes_));
}

// With the lock.
void Promotions::stop_warming() {
  for (const Key& key : warm_) {
    const auto load = loads_.find(key);
    if (load == loads_.end() || load->second.is_taken || load->second.is_urgent) continue;
    loads_.erase(load);
    ++counters_.unwarmed_pages;
  }
  warm_.clear();
}

// Waits for pages to load; false when it is over.
bool Promotions::take(std::vector<Block>* blocks, double* lease_seconds) {
  blocks->clear();
  *lease_seconds = 0;
  Lock lock(mutex_);
  while (blocks->empty()) {
    while (urgent_.empty() && (warm_.empty() || !may_warm())) {
      if (is_closing_) return false;
      disk::wait_until(wanted_, lock, Deadline::after(warm_.empty() ? 1 : kWarmPause), [this] {
        return is_closing_ || !urgent_.empty() || (!warm_.empty() && warm_bytes_ > 0);
      });
    }
    if (is_closing_) return false;
    const uint64_t limit = std::min(kMaxBytes, pool_.data_nbytes() / 8);
    if (!urgent_.empty()) {
      take_from(urgent_, limit, blocks, lease_seconds);
      continue;
    }
    uint64_t n_free = 0;
    const uint64_t room = warm_room(&n_free);
    const uint64_t nbytes = take_from(warm_, std::min(limit, room), blocks, lease_seconds);
    warm_bytes_ -= static_cast<double>(nbytes);
    share_bytes_ -= static_cast<double>(nbytes - std::min(nbytes, n_free));
    if (blocks->empty()) stop_warming();
  }
  return true;
}

// With the lock. Takes pages of at most `limit` bytes off the front; at least one of those somebody waits
// for.
uint64_t Promotions::take_from(std::deque<Key>& queue, uint64_t limit, std::vector<Block>* blocks,
                               double* lease_seconds) {
  uint64_t nbytes = 0;
  while (!queue.empty() && blocks->size() < kMaxPages) {
    const Key key = queue.front();
    const auto load = loads_.find(key);
    if (load == loads_.end() || load->second.is_taken) {  // loaded already: it was on both queues
      queue.pop_front();
      continue;
    }
    uint8_t is_stored = 0;
    CatalogEntry entry;
    store_->look_up(&key, 1, &is_stored, &entry);
    if (is_stored == 0)
      entry.place.length = 1;  // gone since it was asked for: any length will do, its read misses
    const bool must_go = blocks->empty() && load->second.is_urgent;
    if (!must_go && nbytes + entry.place.length > limit) break;
    queue.pop_front();
    nbytes += entry.place.length;
    load->second.is_taken = true;
    *lease_seconds = std::max(*lease_seconds, load->second.lease_seconds);
    blocks->push_back({key, entry.place.length, entry.place.checksum});
  }
  return nbytes;
}

// Reads pages that the pool has not into blocks of it, as they are kept. Returns those that are there, and
// right; `reserved` says of all what became of their blocks.
std::vector<Block> Promotions::read_into_pool(std::vector<Block>& blocks, std::vector<PoolStatus>* reserved) {
  std::vector<Key> keys;
  for (const Block& block : blocks) keys.push_back(block.key);
  std::vector<uint8_t> is_there(keys.size());
  std::vector<Location> locations(keys.size());
  pool_.lookup(keys.data(), keys.size(), is_there.data(), locations.data());
  std::vector<size_t> rows;
  keys.clear();
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (is_there[i] != 0) (*reserved)[i] = PoolStatus::kExists;
    if (is_there[i] != 0) continue;
    rows.push_back(i);
    keys.push_back(blocks[i].key);
  }
  // Only what was read says how many bytes it takes in the pool.
  const auto place = [&](size_t k, const disk::ReadBatch::Found& page) -> uint8_t* {
    Block& block = blocks[rows[k]];
    block.length = page.length;
    block.checksum = page.checksum;
    block.packed = page.packed;
    pool_.reserve_blocks(&block, 1, &(*reserved)[rows[k]]);
    return block.data;
  };
  std::vector<ReadStatus> statuses(keys.size());
  store_->read({keys.size(), 0, keys.data(), nullptr, place}, Deadline::after(kReadSeconds), statuses.data());
  std::vector<Block> wanted;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if ((*reserved)[i] == PoolStatus::kStored) wanted.push_back(blocks[i]);
  }
  return wanted;
}

void Promotions::fill(std::vector<Block>& blocks, double lease_seconds) {
  const size_t n = blocks.size();
  const uint64_t since = store_->now();
  std::vector<PoolStatus> reserved(n, PoolStatus::kNotTried);
  const std::vector<Block> wanted = read_into_pool(blocks, &reserved);
  std::vector<uint8_t> is_filled(wanted.size());
  Loaded own{std::vector<uint8_t>(wanted.size()), std::vector<Location>(wanted.size()),
             std::vector<uint64_t>(wanted.size())};
  {
    // Under one lock: who takes a page back either keeps it out, or finds it in the pool afterwards.
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < wanted.size(); ++i) {
      is_filled[i] = !store_->is_recalled(wanted[i].key, since);
    }
    pool_.commit_blocks(wanted.data(), wanted.size(), is_filled.data(), lease_seconds, own.found.data(),
                        own.tickets.data(), own.locations.data());
  }
  std::vector<Key> promoted;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (is_filled[i] == 0) continue;
    promoted.push_back(wanted[i].key);
    counters_.promoted_bytes += wanted[i].length;
  }
  counters_.promoted_pages += promoted.size();
  tell_changed(promoted);

  Loaded loaded{std::vector<uint8_t>(n), std::vector<Location>(n), std::vector<uint64_t>(n)};
  for (size_t i = 0, filled = 0; i < n; ++i) {
    const Key& key = blocks[i].key;
    if (reserved[i] == PoolStatus::kStored) {
      loaded.found[i] = own.found[filled];
      loaded.tickets[i] = own.tickets[filled];
      loaded.locations[i] = own.locations[filled++];
    } else if (reserved[i] == PoolStatus::kExists) {
      pool_.pin(&key, 1, lease_seconds, &loaded.found[i], &loaded.tickets[i], &loaded.locations[i]);
      if (loaded.found[i] == 0) pool_.lookup(&key, 1, &loaded.found[i], &loaded.locations[i]);
    }
  }
  counters_.failed_pages += static_cast<uint64_t>(std::count(loaded.found.begin(), loaded.found.end(), 0));
  settle(blocks, loaded);
}

void Promotions::wait_committed() {
  const std::lock_guard lock(mutex_);
}

// Every reader gets a pin of its own, for as long as it asked for; who has given up, none. The pin that held
// the page until then ends: it was made for the longest of all leases of its batch.
void Promotions::settle(const std::vector<Block>& blocks, const Loaded& loaded) {
  std::vector<Shared> complete;
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto load = loads_.find(blocks[i].key);
      for (const auto& [question, row] : load->second.waiting) {
        Lease* const lease = question->lease.get();
        if (loaded.found[i] != 0 && lease != nullptr && !lease->is_over) pin_again(blocks[i].key, *lease);
        if (question->is_answered) continue;
        question->found[row] = loaded.found[i];
        question->locations[row] = loaded.locations[i];
        if (--question->n_open > 0) continue;
        question->is_answered = true;
        complete.push_back(question);
      }
      loads_.erase(load);
    }
  }
  unpin(loaded.tickets);
  for (const Shared& question : complete) answer(question);
}

// With the lock.
void Promotions::pin_again(const Key& key, Lease& lease) {
  uint8_t found = 0;
  uint64_t ticket = 0;
  Location location;
  pool_.pin(&key, 1, lease.seconds, &found, &ticket, &location, room_of(lease.asker));
  if (ticket == 0) return;
  lease.tickets.push_back(ticket);
  lease.nbytes += stored_nbytes(location);
}

}  // namespace p2pkv
