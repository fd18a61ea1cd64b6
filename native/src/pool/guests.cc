#include "pool/guests.h"

#include <algorithm>
#include <iterator>
#include <random>
#include <utility>

#include "base/checksum.h"
#include "base/copy.h"

namespace p2pkv {
namespace {

// Guests that are looked at together, whether the pool still has them: each second, and for every few that
// are stored, so that those that were evicted are never many more than those that are there.
constexpr size_t kLookedAt = 512;

uint64_t random_log() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) | 1;
}

}  // namespace

Guests::Guests(std::shared_ptr<Pool> pool, std::shared_ptr<NamespaceEpochs> epochs)
    : pool_(std::move(pool)), epochs_(std::move(epochs)), log_(random_log()) {}

// --- as a source

bool Guests::follow(uint64_t follower, const FollowedPage* pages, size_t n, uint8_t* is_own,
                    TakenBack* known) {
  std::vector<Key> keys(n);
  std::vector<uint8_t> found(n);
  std::vector<Location> locations(n);
  for (size_t i = 0; i < n; ++i) keys[i] = pages[i].key;
  const std::lock_guard lock(mutex_);
  if (followers_.count(follower) == 0 && followers_.size() >= kMostFollowers) return false;
  followers_.insert(follower);
  *known = {log_, number_};
  pool_->lookup(keys.data(), n, found.data(), locations.data());
  for (size_t i = 0; i < n; ++i) {
    const bool is_there = found[i] != 0 && locations[i].generation == pages[i].generation;
    is_own[i] = is_there && !is_guest(keys[i], pages[i].generation);
  }
  return true;
}

TakenBack Guests::count_taken_back() {
  const std::lock_guard lock(mutex_);
  return {log_, ++number_};
}

std::vector<uint64_t> Guests::followers() {
  const std::lock_guard lock(mutex_);
  return {followers_.begin(), followers_.end()};
}

// --- as a holder

void Guests::followed(uint64_t source, TakenBack known) {
  const std::lock_guard lock(mutex_);
  Source& held = sources_[source];
  if (held.n_pages == 0) {
    const bool is_same = held.heard.log == known.log;
    held = {{known.log, is_same ? std::max(held.heard.number, known.number) : known.number}};
  } else if (held.heard.log != known.log) {
    // It was restarted. What it has taken back since, nobody here has heard of.
    if (known.number > 0) return lose(source, known);
    held = {known, 0, held.n_pages};
  } else if (known.number > held.heard.number) {
    // Word of it may be on its way; if it still is at the next time, it was lost.
    if (held.behind > held.heard.number) return lose(source, known);
    held.behind = known.number;
  }
}

void Guests::take_back(const TakeBack& told, const Key* keys, size_t n) {
  const std::lock_guard lock(mutex_);
  const auto found = sources_.find(told.source);
  if (found == sources_.end()) return;
  Source& source = found->second;
  const TakenBack known{told.log, told.number};
  if (source.heard.log != told.log || told.before > source.heard.number) return lose(told.source, known);
  std::vector<Key> those;
  if (told.is_all != 0) {
    those = keys_of(told.source);
  } else {
    std::copy_if(keys, keys + n, std::back_inserter(those), [&](const Key& key) {
      const auto guest = guests_.find(key);
      return guest != guests_.end() && guest->second.source == told.source;
    });
  }
  n_taken_back_ += remove(those);
  source.heard.number = std::max(source.heard.number, told.number);
}

void Guests::store(const Key* keys, const int64_t* addresses, const Origin* origins, size_t n, uint64_t epoch,
                   Location* locations, StoreStatus* statuses) {
  std::vector<Block> blocks(n);
  std::vector<PoolStatus> reserved(n);
  for (size_t i = 0; i < n; ++i) blocks[i] = {keys[i], locations[i].length, locations[i].checksum};
  pool_->reserve_blocks(blocks.data(), n, reserved.data());
  std::vector<size_t> rows;
  std::vector<Block> copied;
  for (size_t i = 0; i < n; ++i) {
    statuses[i] = reserved[i] == PoolStatus::kExists ? StoreStatus::kExists : StoreStatus::kNoRoom;
    if (reserved[i] != PoolStatus::kStored) continue;
    Checksum sum;
    copy_and_checksum(blocks[i].data, reinterpret_cast<const void*>(addresses[i]),
                      static_cast<size_t>(blocks[i].length), sum);
    statuses[i] = sum.finish() == blocks[i].checksum ? StoreStatus::kStored : StoreStatus::kChanged;
    rows.push_back(i);
    copied.push_back(blocks[i]);
  }
  is_used_ = true;
  std::vector<uint8_t> is_filled(rows.size());
  std::vector<uint8_t> found(rows.size());
  std::vector<uint64_t> tickets(rows.size());
  std::vector<Location> where(rows.size());
  // Under one lock: who takes a page back either keeps it out, or finds it here afterwards.
  const std::lock_guard lock(mutex_);
  for (size_t k = 0; k < rows.size(); ++k) {
    StoreStatus& status = statuses[rows[k]];
    if (status == StoreStatus::kStored && !may_store(origins[rows[k]], epoch))
      status = StoreStatus::kTakenBack;
    is_filled[k] = status == StoreStatus::kStored;
  }
  pool_->commit_blocks(copied.data(), rows.size(), is_filled.data(), 0, found.data(), tickets.data(),
                       where.data());
  forget_evicted();
  std::vector<Key> stored;
  for (size_t k = 0; k < rows.size(); ++k) {
    const size_t i = rows[k];
    if (is_filled[k] == 0) continue;
    const uint64_t offset = pool_->data_offset() + uint64_t{copied[k].granule} * pool_->granule();
    if (found[k] == 0 || where[k].offset != offset) {  // another one was faster
      statuses[i] = found[k] != 0 ? StoreStatus::kExists : StoreStatus::kNoRoom;
      continue;
    }
    locations[i] = where[k];
    forget(keys[i]);  // of one that was evicted before
    guests_[keys[i]] = {origins[i].source, where[k].generation};
    ++sources_[origins[i].source].n_pages;
    stored.push_back(keys[i]);
  }
  // The epoch is raised before pages are taken back: if it still is that one, these are among them.
  if (epochs_->own() == epoch) return;
  remove(stored);
  for (const size_t i : rows) {
    if (statuses[i] == StoreStatus::kStored) statuses[i] = StoreStatus::kTakenBack;
  }
}

bool Guests::has(const Key& key, uint64_t generation) {
  if (!is_used_) return false;
  const std::lock_guard lock(mutex_);
  return is_guest(key, generation);
}

size_t Guests::take_out(const Key* keys, size_t n) {
  if (!is_used_) return 0;
  const std::lock_guard lock(mutex_);
  std::vector<Key> those;
  std::copy_if(keys, keys + n, std::back_inserter(those),
               [this](const Key& key) { return guests_.count(key) > 0; });
  return remove(those);
}

std::vector<uint64_t> Guests::sources() {
  const std::lock_guard lock(mutex_);
  forget_evicted();
  std::erase_if(sources_, [](const auto& source) { return source.second.n_pages == 0; });
  std::vector<uint64_t> out;
  for (const auto& [source, held] : sources_) out.push_back(source);
  return out;
}

Guests::Stats Guests::stats() {
  const std::lock_guard lock(mutex_);
  return {guests_.size(), n_taken_back_, n_sources_lost_};
}

// --- with the lock

bool Guests::is_guest(const Key& key, uint64_t generation) const {
  const auto found = guests_.find(key);
  return found != guests_.end() && found->second.generation == generation;
}

bool Guests::may_store(const Origin& origin, uint64_t epoch) const {
  const auto source = sources_.find(origin.source);
  if (source == sources_.end() || epochs_->own() != epoch) return false;
  const TakenBack& heard = source->second.heard;
  return heard.log == origin.since.log && heard.number <= origin.since.number;
}

std::vector<Key> Guests::keys_of(uint64_t source) const {
  std::vector<Key> keys;
  for (const auto& [key, guest] : guests_) {
    if (guest.source == source) keys.push_back(key);
  }
  return keys;
}

void Guests::forget(const Key& key) {
  const auto found = guests_.find(key);
  if (found == guests_.end()) return;
  --sources_[found->second.source].n_pages;
  guests_.erase(found);
}

void Guests::forget_evicted() {
  std::vector<Key> keys;
  const size_t n_buckets = guests_.bucket_count();
  size_t bucket = next_bucket_;
  for (size_t i = 0; i < n_buckets && keys.size() < kLookedAt; ++i) {
    bucket = (bucket + 1) % n_buckets;
    for (auto guest = guests_.begin(bucket); guest != guests_.end(bucket); ++guest)
      keys.push_back(guest->first);
  }
  next_bucket_ = bucket;
  std::vector<uint8_t> found(keys.size());
  std::vector<Location> locations(keys.size());
  pool_->lookup(keys.data(), keys.size(), found.data(), locations.data());
  for (size_t i = 0; i < keys.size(); ++i) {
    if (found[i] == 0 || !is_guest(keys[i], locations[i].generation)) forget(keys[i]);
  }
}

// Of guests. Returns how many were in the pool until now.
size_t Guests::remove(const std::vector<Key>& keys) {
  std::vector<Key> those;  // each once, whoever named some twice
  std::vector<uint64_t> generations;
  for (const Key& key : keys) {
    const auto guest = guests_.find(key);
    if (guest == guests_.end()) continue;
    those.push_back(key);
    generations.push_back(guest->second.generation);
    forget(key);
  }
  return pool_->retract_exactly(those.data(), generations.data(), those.size());
}

void Guests::lose(uint64_t source, TakenBack known) {
  const size_t n = remove(keys_of(source));
  n_taken_back_ += n;
  n_sources_lost_ += n > 0 ? 1 : 0;
  sources_[source] = {known};
}

}  // namespace p2pkv
