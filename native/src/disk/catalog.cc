#include "disk/catalog.h"

#include <algorithm>
#include <utility>

#include "disk/waiting.h"

namespace p2pkv::disk {
namespace {

// More keys than a segment can hold: 512 MiB of records of 128 bytes. Leaves 40 bits for a unit's id.
constexpr uint64_t kPositions = 1 << 24;

}  // namespace

void Catalog::contains(const Key* keys, size_t n, uint8_t* found) {
  const Lock lock(mutex_);
  for (size_t i = 0; i < n; ++i) found[i] = index_.contains(keys[i]);
}

void Catalog::look_up(const Key* keys, size_t n, uint8_t* found, CatalogEntry* entries) {
  const Lock lock(mutex_);
  look_up_locked(keys, n, found, entries);
}

bool Catalog::try_look_up(const Key* keys, size_t n, uint8_t* found, CatalogEntry* entries) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock.owns_lock()) look_up_locked(keys, n, found, entries);
  return lock.owns_lock();
}

void Catalog::look_up_locked(const Key* keys, size_t n, uint8_t* found, CatalogEntry* entries) const {
  for (size_t i = 0; i < n; ++i) {
    const auto place = index_.find(keys[i]);
    found[i] = place != index_.end();
    entries[i] = {keys[i], found[i] != 0 ? place->second : Place{}};
  }
}

// The cursor is a unit's id and a position in its list of keys, which only grows while it is not retired.
uint64_t Catalog::list(uint64_t cursor, size_t max, std::vector<Key>* keys) {
  const Lock lock(mutex_);
  size_t at = cursor % kPositions;
  auto next = by_id_.lower_bound(cursor / kPositions);
  if (next == by_id_.end() || next->first != cursor / kPositions) at = 0;
  for (size_t n = 0; next != by_id_.end(); ++next, at = 0) {
    const Unit& unit = *next->second;
    for (; at < unit.keys.size(); ++at) {
      if (n == max) return next->first * kPositions + at;
      const auto found = index_.find(unit.keys[at]);
      if (found == index_.end() || found->second.unit != &unit) continue;
      keys->push_back(unit.keys[at]);
      ++n;
    }
  }
  return 0;
}

void Catalog::forget_keys(const Key* keys, size_t n, uint8_t* had) {
  std::vector<Key> gone;
  {
    const Lock lock(mutex_);
    for (size_t i = 0; i < n; ++i) {
      const auto found = index_.find(keys[i]);
      had[i] = found != index_.end();
      if (had[i] == 0) continue;
      Unit* unit = found->second.unit;
      index_.erase(found);
      note(keys[i], PageEvent::kTakenFromDisk);
      gone.push_back(keys[i]);
      if (!unit->is_open && unit->keys.size() == 1) retire_locked(unit, &gone);
    }
  }
  log(dropped_, gone);
}

void Catalog::forget_all_keys() {
  std::vector<Key> gone;
  {
    const Lock lock(mutex_);
    for (const auto& [key, place] : index_) {
      note(key, PageEvent::kDiskCleared);
      gone.push_back(key);
    }
    index_.clear();
  }
  log(dropped_, gone);
}

void Catalog::hold_pages(const Key* keys, size_t n, Place* places) {
  const Lock lock(mutex_);
  for (size_t i = 0; i < n; ++i) {
    const auto found = index_.find(keys[i]);
    places[i] = found == index_.end() ? Place{} : found->second;
    if (Unit* unit = places[i].unit; unit != nullptr) {
      ++unit->n_holds;
      if (order_ == EvictionOrder::kLeastRecentlyRead) live_.splice(live_.end(), live_, unit->position);
    }
  }
}

void Catalog::release(Unit* unit) {
  {
    const Lock lock(mutex_);
    if (--unit->n_holds > 0 || !unit->is_retired) return;
    due_.push_back(unit);
  }
  deletable_.notify_one();
}

bool Catalog::drop(const Key& key, const Place& place) {
  std::vector<Key> gone;
  {
    const Lock lock(mutex_);
    const auto found = index_.find(key);
    if (found == index_.end() || found->second.unit != place.unit || found->second.offset != place.offset)
      return false;
    index_.erase(found);
    note(key, PageEvent::kBadOnDisk);
    gone.push_back(key);
    // a unit that holds nothing else is of no use any more
    if (!place.unit->is_open && place.unit->keys.size() == 1) retire_locked(place.unit, &gone);
  }
  log(dropped_, gone);
  return true;
}

std::vector<CatalogEntry> Catalog::drain_recovered(size_t max, const Deadline& deadline) {
  const std::vector<Key> keys = recovered_.drain(max, deadline);
  std::vector<CatalogEntry> entries;
  const Lock lock(mutex_);
  for (const Key& key : keys) {
    if (const auto found = index_.find(key); found != index_.end()) entries.push_back({key, found->second});
  }
  return entries;
}

void Catalog::log(KeyLog& log, const std::vector<Key>& keys) {
  if (keys.empty()) return;
  log.push(keys.data(), keys.size());
  changed_();
}

void Catalog::close() {
  dropped_.close();
  recovered_.close();
}

Unit* Catalog::add_unit(std::unique_ptr<Unit> unit) {
  const Lock lock(mutex_);
  used_ += unit->nbytes;
  Unit* added = unit.get();
  added->position = live_.insert(live_.end(), std::move(unit));
  by_id_[added->id] = added;
  return added;
}

void Catalog::admit(Unit* unit) {
  std::vector<Key> gone;
  {
    const Lock lock(mutex_);
    unit->is_open = false;
    const auto is_here = [&](const Key& key) {
      const auto found = index_.find(key);
      return found != index_.end() && found->second.unit == unit;
    };
    if (unit->is_retired || std::any_of(unit->keys.begin(), unit->keys.end(), is_here)) return;
    retire_locked(unit, &gone);
  }
  log(dropped_, gone);
}

void Catalog::resize(Unit* unit, uint64_t nbytes) {
  const Lock lock(mutex_);
  used_ += nbytes - unit->nbytes;
  unit->nbytes = nbytes;
}

Unit* Catalog::hold_unit(uint64_t id) {
  const Lock lock(mutex_);
  const auto found = by_id_.find(id);
  if (found == by_id_.end() || found->second->is_retired) return nullptr;
  ++found->second->n_holds;
  return found->second;
}

size_t Catalog::add(const CatalogEntry* entries, size_t n, Source source) {
  std::vector<Key> added;
  std::vector<Key> gone;
  {
    const Lock lock(mutex_);
    for (size_t i = 0; i < n; ++i) {
      const auto& [key, place, since] = entries[i];
      if (place.unit->is_retired) continue;
      // with the lock: whoever takes the page back finds it here afterwards, or it is left out
      if (source == Source::kWritten ? recalls_.is_recalled(key, since)
                                     : recalls_.is_void(key, order_of(place))) {
        if (source == Source::kWritten) recalls_.keep(key);  // its record lies there
        continue;
      }
      const auto [known, is_new] = index_.try_emplace(key, place);
      Unit* const before = is_new ? nullptr : known->second.unit;
      if (!is_new) {
        if (order_of(known->second) > order_of(place)) continue;
        known->second = place;
      }
      if (before == place.unit) continue;
      place.unit->keys.push_back(key);
      added.push_back(key);
      if (is_new) note(key, PageEvent::kWritten);
      if (before != nullptr && !before->is_open && before->keys.size() == 1) retire_locked(before, &gone);
    }
  }
  if (source == Source::kRecovered) log(recovered_, added);
  log(dropped_, gone);
  return added.size();
}

void Catalog::note(const Key& key, PageEvent event) {
  if (changes_) changes_->push(key, Medium::kDisk, event);
}

void Catalog::retire_locked(Unit* unit, std::vector<Key>* gone, PageEvent why) {
  for (const Key& key : unit->keys) {
    const auto found = index_.find(key);
    if (found == index_.end() || found->second.unit != unit) continue;
    index_.erase(found);
    note(key, why);
    gone->push_back(key);
  }
  unit->keys = {};
  unit->is_retired = true;
  retired_.splice(retired_.end(), live_, unit->position);
  if (unit->n_holds == 0) due_.push_back(unit);
}

bool Catalog::retire_next() {
  std::vector<Key> gone;
  {
    const Lock lock(mutex_);
    auto next = live_.begin();
    while (next != live_.end() && (*next)->is_open) ++next;
    if (next == live_.end()) return false;
    retire_locked(next->get(), &gone);
    n_evicted_ += gone.size();
  }
  log(dropped_, gone);
  return true;
}

void Catalog::retire(Unit* unit) {
  std::vector<Key> gone;
  {
    const Lock lock(mutex_);
    if (unit->is_retired) return;
    retire_locked(unit, &gone);
  }
  log(dropped_, gone);
}

void Catalog::retire_all() {
  std::vector<Key> gone;
  {
    const Lock lock(mutex_);
    for (auto next = live_.begin(); next != live_.end();) {
      Unit* const unit = (next++)->get();
      if (!unit->is_fixed) retire_locked(unit, &gone, PageEvent::kTakenFromDisk);
    }
  }
  log(dropped_, gone);
}

void Catalog::clear() {
  const Lock lock(mutex_);
  index_.clear();
  by_id_.clear();
  due_.clear();
  n_unread_ = 0;
  live_.clear();
  retired_.clear();
}

std::vector<Unit*> Catalog::take_deletable(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  if (!retired_.empty()) wait_until(deletable_, lock, deadline, [this] { return !due_.empty(); });
  return std::exchange(due_, {});
}

void Catalog::forget(Unit* unit) {
  const Lock lock(mutex_);
  used_ -= unit->nbytes;
  n_unread_ -= unit->is_unread ? 1U : 0U;
  if (const auto found = by_id_.find(unit->id); found != by_id_.end() && found->second == unit)
    by_id_.erase(found);
  retired_.erase(unit->position);
}

void Catalog::note_unread(Unit* unit) {
  const Lock lock(mutex_);
  n_unread_ += unit->is_unread ? 0U : 1U;
  unit->is_unread = true;
}

bool Catalog::has_unread() const {
  const Lock lock(mutex_);
  return n_unread_ > 0;
}

bool Catalog::has_retired() const {
  const Lock lock(mutex_);
  return !retired_.empty();
}

uint64_t Catalog::oldest_order(uint64_t otherwise) const {
  const Lock lock(mutex_);
  uint64_t oldest = otherwise;
  for (const Units* units : {&live_, &retired_}) {
    for (const auto& unit : *units) oldest = std::min(oldest, unit->order);
  }
  return oldest;
}

uint64_t Catalog::used() const {
  const Lock lock(mutex_);
  return used_;
}

uint64_t Catalog::n_pages() const {
  const Lock lock(mutex_);
  return index_.size();
}

}  // namespace p2pkv::disk
