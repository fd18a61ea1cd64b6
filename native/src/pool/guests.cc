#include "pool/guests.h"

#include <algorithm>
#include <iterator>
#include <random>
#include <set>
#include <utility>

#include "base/checksum.h"
#include "base/copy.h"

namespace p2pkv {
namespace {

// Guests that are looked at together, whether the pool still has them: each second, and for every few that
// are stored, so that those that were evicted are never many more than those that are there.
constexpr size_t kLookedAt = 512;
// Guests that are taken out before others are let in: 0.2 to 0.5 ms, as they are taken out of the pool as
// well.
constexpr size_t kGoAtOnce = 512;

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
  const Lock lock(mutex_);
  if (!has_place_for(follower)) return false;
  followers_[follower] = {0, ++n_follows_};
  *known = {log_, number_};
  pool_->lookup(keys.data(), n, found.data(), locations.data());
  for (size_t i = 0; i < n; ++i) {
    const bool is_there = found[i] != 0 && locations[i].generation == pages[i].generation;
    is_own[i] = is_there && !is_guest(keys[i], pages[i].generation);
  }
  return true;
}

TakenBack Guests::count_taken_back() {
  const Lock lock(mutex_);
  return {log_, ++number_};
}

TakenBack Guests::taken_back() {
  const Lock lock(mutex_);
  return {log_, number_};
}

std::vector<uint64_t> Guests::followers() {
  const Lock lock(mutex_);
  std::vector<uint64_t> followers;
  for (const auto& [follower, known] : followers_) followers.push_back(follower);
  return followers;
}

void Guests::forget_absent(const std::vector<uint64_t>& members, int64_t now_ns) {
  std::set<uint64_t> present(members.begin(), members.end());
  const Lock lock(mutex_);
  members_ = std::move(present);
  for (auto& [follower, known] : followers_) {
    if (members_.count(follower) > 0) {
      known.absent_since = 0;
    } else if (known.absent_since == 0) {
      known.absent_since = now_ns;
    }
  }
  std::erase_if(followers_, [&](const auto& follower) {
    const int64_t since = follower.second.absent_since;
    return since != 0 && now_ns - since >= kForgetAfterNs;
  });
}

// --- as a holder

void Guests::followed(uint64_t source, TakenBack known, bool was_out_of_touch) {
  {
    const Lock lock(mutex_);
    Source& held = sources_[source];
    if (held.n_pages() == 0) {
      const bool is_same = held.heard.log == known.log;
      held = {{known.log, is_same ? std::max(held.heard.number, known.number) : known.number}};
      return;
    }
    const bool is_other_run = held.heard.log != known.log;
    const bool is_behind = held.behind > held.heard.number;
    if (is_other_run && known.number == 0 && !was_out_of_touch && !is_behind) {
      held.heard = known;
      held.behind = 0;
    } else if (is_other_run || (known.number > held.heard.number && is_behind)) {
      // What it has taken back since it was restarted, or since it was last asked, nobody here has heard of.
      lose(source, known);
    } else if (known.number > held.heard.number) {
      held.behind =
          known.number;  // word of it may be on its way; if it still is at the next time, it was lost
    }
  }
  while (take_turn()) {
  }
}

uint64_t Guests::take_back(const TakeBack& told, const Key* keys, size_t n) {
  const Lock lock(mutex_);
  const auto found = sources_.find(told.source);
  const bool is_known = found != sources_.end();
  if (is_known) {
    const TakenBack& heard = found->second.heard;
    if (heard.log != told.log || told.before > heard.number) {
      lose(told.source, {told.log, told.number});
    } else if (told.is_all != 0) {
      let_go(&found->second);
    }
    found->second.heard.number = std::max(heard.number, told.number);
  }
  std::vector<Key> those;
  std::copy_if(keys, keys + n, std::back_inserter(those), [&](const Key& key) {
    const auto guest = guests_.find(key);
    return guest != guests_.end() && guest->second.group->source == told.source;
  });
  n_taken_back_ += remove(those);
  return n_gone_ + going_.size();
}

bool Guests::take_turn() {
  const Lock lock(mutex_);
  mutex_.let_in();
  if (!going_.empty()) {
    std::list<Key>& keys = going_.front()->keys;
    const size_t n = std::min(kGoAtOnce, keys.size());
    n_taken_back_ += remove({keys.begin(), std::next(keys.begin(), static_cast<ptrdiff_t>(n))});
    if (keys.empty()) {
      going_.pop_front();
      ++n_gone_;
    }
  }
  return !going_.empty();
}

bool Guests::is_going() {
  const Lock lock(mutex_);
  return !going_.empty();
}

bool Guests::has_gone(uint64_t ticket) {
  const Lock lock(mutex_);
  return n_gone_ >= ticket;
}

void Guests::store(const Key* keys, const int64_t* addresses, const Origin* origins, size_t n, uint64_t epoch,
                   Location* locations, StoreStatus* statuses) {
  std::vector<Block> blocks(n);
  std::vector<PoolStatus> reserved(n);
  for (size_t i = 0; i < n; ++i) {
    blocks[i] = {keys[i], locations[i].length, locations[i].checksum};
    blocks[i].is_guest = true;
  }
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
  const Lock lock(mutex_);
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
    add(keys[i], origins[i].source, where[k].generation);
    stored.push_back(keys[i]);
  }
  // The epoch is raised before pages are taken back: if it still is that one, these are among them.
  if (epochs_->own() == epoch) return;
  remove(stored);
  for (const size_t i : rows) {
    if (statuses[i] == StoreStatus::kStored) statuses[i] = StoreStatus::kTakenBack;
  }
}

void Guests::adopt(uint64_t source, TakenBack last, std::vector<Key>* keys) {
  for (bool is_more = true; is_more;) {
    const Lock lock(mutex_);
    mutex_.let_in();
    is_more = adopt_some(source, last, keys);
  }
  while (take_turn()) {
  }
}

bool Guests::has(const Key& key, uint64_t generation) {
  if (!is_used_) return false;
  const Lock lock(mutex_);
  return is_guest(key, generation);
}

void Guests::leave_out(const Key* keys, const Location* locations, size_t n, uint8_t* found) {
  if (!is_used_) return;
  const Lock lock(mutex_);
  for (size_t i = 0; i < n; ++i) {
    if (found[i] != 0 && is_guest(keys[i], locations[i].generation)) found[i] = 0;
  }
}

size_t Guests::take_out(const Key* keys, size_t n) {
  if (!is_used_) return 0;
  const Lock lock(mutex_);
  return remove(those_of(keys, n));
}

size_t Guests::evict(const Key* keys, size_t n) {
  const Lock lock(mutex_);
  return remove(those_of(keys, n), PageEvent::kEvicted);
}

void Guests::take_out_all() {
  {
    const Lock lock(mutex_);
    for (auto& [source, held] : sources_) let_go(&held);
  }
  while (take_turn()) {
  }
}

std::vector<uint64_t> Guests::sources() {
  const Lock lock(mutex_);
  forget_evicted();
  std::erase_if(sources_, [](const auto& source) { return source.second.n_pages() == 0; });
  std::vector<uint64_t> out;
  for (const auto& [source, held] : sources_) out.push_back(source);
  return out;
}

Guests::Stats Guests::stats() {
  const Lock lock(mutex_);
  return {guests_.size(), n_taken_back_, n_sources_lost_};
}

// --- with the lock

// Nobody can tell those anything who are no members. So a member takes the place of the one of these that has
// asked longest ago, and a peer that follows under names it has made up keeps out nobody but such.
bool Guests::has_place_for(uint64_t follower) {
  if (followers_.count(follower) > 0 || followers_.size() < kMostFollowers) return true;
  if (members_.count(follower) == 0) return false;
  auto goes = followers_.end();
  for (auto one = followers_.begin(); one != followers_.end(); ++one) {
    if (members_.count(one->first) > 0) continue;
    if (goes == followers_.end() || one->second.asked < goes->second.asked) goes = one;
  }
  if (goes == followers_.end()) return false;
  followers_.erase(goes);
  return true;
}

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

void Guests::add(const Key& key, uint64_t source, uint64_t generation) {
  std::unique_ptr<Group>& group = sources_[source].guests;
  if (!group) group = std::make_unique<Group>(Group{source, {}});
  guests_[key] = {generation, group.get(), group->keys.insert(group->keys.end(), key)};
}

// False when none is left. What was heard is looked at in each turn: others were let in between.
bool Guests::adopt_some(uint64_t source, TakenBack last, std::vector<Key>* keys) {
  const auto found = sources_.find(source);
  if (found == sources_.end() || found->second.n_pages() == 0) return false;
  const TakenBack& heard = found->second.heard;
  if (heard.log != last.log || heard.number != last.number) {
    lose(source, last);
    return false;
  }
  const size_t first = keys->size();
  std::vector<uint64_t> generations;
  std::list<Key>& guests = found->second.guests->keys;
  while (!guests.empty() && generations.size() < kGoAtOnce) {
    keys->push_back(guests.front());
    generations.push_back(guests_.at(guests.front()).generation);
    forget(Key(guests.front()));
  }
  pool_->make_own(keys->data() + first, generations.data(), generations.size());
  return !guests.empty();
}

void Guests::forget(const Key& key) {
  const auto found = guests_.find(key);
  if (found == guests_.end()) return;
  found->second.group->keys.erase(found->second.place);
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

std::vector<Key> Guests::those_of(const Key* keys, size_t n) const {
  std::vector<Key> those;
  std::copy_if(keys, keys + n, std::back_inserter(those),
               [this](const Key& key) { return guests_.count(key) > 0; });
  return those;
}

// Of guests. Returns how many were in the pool until now.
size_t Guests::remove(const std::vector<Key>& keys, PageEvent why) {
  std::vector<Key> those;  // each once, whoever named some twice
  std::vector<uint64_t> generations;
  for (const Key& key : keys) {
    const auto guest = guests_.find(key);
    if (guest == guests_.end()) continue;
    those.push_back(key);
    generations.push_back(guest->second.generation);
    forget(key);
  }
  return pool_->retract_exactly(those.data(), generations.data(), those.size(), why);
}

void Guests::lose(uint64_t source, TakenBack known) {
  Source& lost = sources_[source];
  n_sources_lost_ += lost.n_pages() > 0 ? 1 : 0;
  let_go(&lost);
  lost.heard = known;
  lost.behind = 0;
}

// All guests of a source are going from now on: nothing that is stored later is among them.
void Guests::let_go(Source* source) {
  if (source->n_pages() > 0) going_.push_back(std::move(source->guests));
}

}  // namespace p2pkv
