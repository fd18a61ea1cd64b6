#include "directory/shard.h"

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>

#include "base/clock.h"

namespace p2pkv {
namespace {

constexpr size_t kFirstTable = 64;
// How many keys before its turn a key's lines are asked for: about what a line takes to come, divided by what
// a key takes.
constexpr size_t kAhead = 8;
// 2^64 by the golden ratio: multiples of it, and products with it, are spread evenly.
constexpr uint64_t kOddFraction = 0x9e37'79b9'7f4a'7c15;

}  // namespace

Shard::Shard(uint64_t max_entries, std::shared_ptr<PageHistory> history)
    : max_entries_a_stripe_(std::max<uint64_t>(1, max_entries / kStripes)),
      history_(std::move(history)),
      lives_(std::make_shared<const OwnerLives>()) {
  for (Stripe& stripe : stripes_) stripe.take(std::vector<Entry>(kFirstTable));
}

void Shard::Stripe::take(std::vector<Entry> next) {
  table = std::move(next);
  first.store(table.data(), std::memory_order_relaxed);
  mask.store(table.size() - 1, std::memory_order_relaxed);
}

void Shard::prefetch(const Key& key) const {
  const Stripe& stripe = stripes_[key.bytes[15] % kStripes];
  const size_t slot = hash_of(key) & stripe.mask.load(std::memory_order_relaxed);
  const auto at =
      reinterpret_cast<uintptr_t>(stripe.first.load(std::memory_order_relaxed)) + slot * sizeof(Entry);
  __builtin_prefetch(reinterpret_cast<const void*>(at));
  __builtin_prefetch(reinterpret_cast<const void*>(at + sizeof(Entry) - 1));
}

uint32_t Shard::now() const {
  const int64_t simulated = simulated_now_;
  return simulated < 0 ? steady_seconds() : static_cast<uint32_t>(simulated);
}

std::shared_ptr<const OwnerLives> Shard::lives() {
  std::lock_guard lock(lives_mutex_);
  return lives_;
}

void Shard::get(const Key* keys, size_t n, uint8_t* found, Location* locations) {
  const auto lives = this->lives();
  const Leftovers left = leftovers(now());
  Location counted{};  // of an owner that counts, as it was told: pages of one prompt are of few owners
  uint64_t boot = 0;   // that one's now
  for (size_t i = 0; i < std::min(n, kAhead); ++i) prefetch(keys[i]);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch(keys[i + kAhead]);
    Stripe& stripe = stripe_of(keys[i]);
    std::lock_guard lock(stripe.mutex);
    found[i] = 0;
    const size_t mask = stripe.table.size() - 1;
    for (size_t slot = slot_of(stripe, keys[i]); stripe.table[slot].state != kEmpty;
         slot = (slot + 1) & mask) {
      const Entry& entry = stripe.table[slot];
      if (!(entry.key == keys[i])) continue;
      const bool is_of_counted = boot != 0 && entry.state == kLive && entry.location.owner == counted.owner &&
                                 entry.location.boot == counted.boot;
      const uint64_t now = is_of_counted ? boot : entry.state == kLive ? lives->boot_now(entry.location) : 0;
      if (now == 0 || left.has(entry)) continue;
      found[i] = 1;
      if (!is_of_counted) {
        counted = entry.location;
        boot = now;
      }
      locations[i] = entry.location;
      locations[i].boot = boot;
      if ((entry.location.flags & kResident) != 0) break;  // no other copy is nearer
    }
  }
}

void Shard::get_holders(const Key* keys, size_t n, size_t most, uint8_t* n_named,
                        std::vector<Location>* locations) {
  const auto lives = this->lives();
  const Leftovers left = leftovers(now());
  const size_t n_most = std::min(most, kMostHolders);
  // All pages of a question have one draw, so that of pages that lie together with many nodes the same ones
  // are named.
  const uint64_t draw = n_most > 1 ? n_draws_.fetch_add(1, std::memory_order_relaxed) * kOddFraction : 0;
  const auto rank = [draw](const Location& each) { return (each.owner ^ draw) * kOddFraction; };
  for (size_t i = 0; i < std::min(n, kAhead); ++i) prefetch(keys[i]);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch(keys[i + kAhead]);
    Stripe& stripe = stripe_of(keys[i]);
    const size_t first = locations->size();
    {
      const std::lock_guard lock(stripe.mutex);
      const size_t mask = stripe.table.size() - 1;
      for (size_t slot = slot_of(stripe, keys[i]); stripe.table[slot].state != kEmpty;
           slot = (slot + 1) & mask) {
        const Entry& entry = stripe.table[slot];
        if (!(entry.key == keys[i]) || entry.state != kLive) continue;
        const uint64_t boot = lives->boot_now(entry.location);
        if (boot == 0 || left.has(entry)) continue;
        locations->push_back(entry.location);
        locations->back().boot = boot;
      }
    }
    const auto begin = locations->begin() + static_cast<ptrdiff_t>(first);
    // Rarely is there more than one to put in order, and a stable partition takes memory.
    if (locations->size() - first > 1) {
      const auto end = std::stable_partition(begin, locations->end(), [](const Location& each) {
        return (each.flags & kResident) != 0;  // no other copy is nearer
      });
      const auto n_resident = static_cast<size_t>(end - begin);
      if (n_most > 1 && n_resident > n_most) {
        const auto named = begin + static_cast<ptrdiff_t>(n_most);
        std::partial_sort(begin + 1, named, end,
                          [&](const Location& a, const Location& b) { return rank(a) < rank(b); });
      }
    }
    const size_t n_kept = std::min(locations->size() - first, n_most);
    locations->resize(first + n_kept);
    n_named[i] = static_cast<uint8_t>(n_kept);
  }
}

std::vector<Shard::Known> Shard::entries_of(const Key& key, uint32_t now) {
  const auto lives = this->lives();
  const Leftovers left = leftovers(now);
  Stripe& stripe = stripe_of(key);
  std::vector<Known> known;
  const std::lock_guard lock(stripe.mutex);
  const size_t mask = stripe.table.size() - 1;
  for (size_t slot = slot_of(stripe, key); stripe.table[slot].state != kEmpty; slot = (slot + 1) & mask) {
    const Entry& entry = stripe.table[slot];
    if (!(entry.key == key)) continue;
    const uint32_t age = now > entry.stamp ? now - entry.stamp : 0;
    known.push_back({entry.location, age, entry.state == kLive, counts(entry, *lives) && !left.has(entry)});
  }
  return known;
}

void Shard::note(const Entry& entry, PageEvent event) {
  if (history_) history_->note(entry.key, event, entry.location.owner);
}

void Shard::keep_present(Location* locations, uint8_t* found, size_t n) {
  const auto lives = this->lives();
  for (size_t i = 0; i < n; ++i) {
    if (found[i] == 0) continue;
    if (const uint64_t boot = lives->boot_now(locations[i]); boot != 0) {
      locations[i].boot = boot;
    } else {
      found[i] = 0;
    }
  }
}

size_t Shard::put(const wire::PutEntry* entries, size_t n, uint32_t now) {
  const auto lives = this->lives();
  const auto rings = this->rings();
  size_t refused = 0;
  for (size_t i = 0; i < n; ++i) {
    Stripe& stripe = stripe_of(entries[i].key);
    std::lock_guard lock(stripe.mutex);
    if (!put_one(stripe, entries[i], *lives, now)) ++refused;
    if (rings != nullptr && !has_place_in(*rings, entries[i].key)) look_for_leftovers();
  }
  return refused;
}

void Shard::put_own(const wire::PutEntry* entries, size_t n, uint32_t now, uint8_t* is_own) {
  const auto rings = this->rings();
  std::vector<wire::PutEntry> own;
  for (size_t i = 0; i < n; ++i) {
    is_own[i] = rings != nullptr && rings->front()->is_own(entries[i].key) ? 1 : 0;
    if (is_own[i] != 0) own.push_back(entries[i]);
  }
  put(own.data(), own.size(), now);
}

bool Shard::counts(const Entry& entry, const OwnerLives& lives) {
  return entry.state == kLive && lives.counts(entry.location);
}

bool Shard::goes_before(const Entry& a, const Entry& b, const OwnerLives& lives) {
  const bool a_counts = counts(a, lives);
  if (a_counts != counts(b, lives)) return !a_counts;
  if (a_counts && is_resident(a) != is_resident(b)) return !is_resident(a);
  const bool a_may_come_back = lives.may_come_back(a.location);
  if (a_may_come_back != lives.may_come_back(b.location)) return !a_may_come_back;
  return a.stamp < b.stamp;
}

Shard::Places Shard::places_of(Stripe& stripe, const Key& key, uint64_t owner, const OwnerLives& lives) {
  Places at;
  const size_t mask = stripe.table.size() - 1;
  for (size_t slot = slot_of(stripe, key); stripe.table[slot].state != kEmpty; slot = (slot + 1) & mask) {
    Entry& entry = stripe.table[slot];
    if (!(entry.key == key)) continue;
    if (entry.location.owner == owner) {
      at.own = &entry;
    } else if (entry.state == kTombstone) {
      ++at.n_tombstones;
      if (at.oldest_tombstone == nullptr || entry.stamp < at.oldest_tombstone->stamp) {
        at.oldest_tombstone = &entry;
      }
    } else {
      ++at.n_live;
      if (at.first_to_go == nullptr || goes_before(entry, *at.first_to_go, lives)) at.first_to_go = &entry;
    }
  }
  return at;
}

bool Shard::put_one(Stripe& stripe, const wire::PutEntry& put, const OwnerLives& lives, uint32_t now) {
  const Places at = places_of(stripe, put.key, put.location.owner, lives);
  const Entry fresh{put.key, put.sequence, put.location, now, kLive, {}};
  if (at.own != nullptr) {
    const Location& known = at.own->location;
    const bool newer = put.location.boot > known.boot ||
                       (put.location.boot == known.boot && put.sequence > at.own->sequence);
    if (!newer) return true;  // a late or repeated message: what is known is at least as new
    if (at.own->state == kLive) {
      *at.own = fresh;
      return true;
    }
  }
  Entry* place = at.own;  // none: one more
  if (at.n_live >= kMaxOwners) {
    if (counts(*at.first_to_go, lives)) {
      const bool is_nearer = is_resident(fresh) && !is_resident(*at.first_to_go);
      stripe.spares.add(put.key, is_nearer ? at.first_to_go->location.owner : put.location.owner);
      if (!is_nearer) return true;
    }
    place = at.first_to_go;
  } else if (place == nullptr &&
             (at.n_tombstones >= kMaxTombstones || stripe.used >= max_entries_a_stripe_)) {
    place = at.oldest_tombstone;
    if (place == nullptr) return false;
  }
  stripe.spares.remove(put.key, put.location.owner);
  if (place == nullptr) return insert(stripe, fresh);
  if (place->state == kTombstone) --stripe.tombstones;
  *place = fresh;
  if (at.own != nullptr && at.own != place) erase(stripe, static_cast<size_t>(at.own - stripe.table.data()));
  return true;
}

bool Shard::insert(Stripe& stripe, const Entry& entry) {
  // At three quarters full, linear probing still looks at about two and a half slots a hit.
  if ((stripe.used + 1) * 4 > stripe.table.size() * 3) grow(stripe);
  const size_t mask = stripe.table.size() - 1;
  size_t slot = slot_of(stripe, entry.key);
  while (stripe.table[slot].state != kEmpty) slot = (slot + 1) & mask;
  stripe.table[slot] = entry;
  ++stripe.used;
  if (entry.state == kTombstone) ++stripe.tombstones;
  return true;
}

void Shard::grow(Stripe& stripe) {
  std::vector<Entry> next(stripe.table.size() * 2);
  const std::vector<Entry> old = std::move(stripe.table);
  stripe.take(std::move(next));
  stripe.used = 0;
  stripe.tombstones = 0;
  for (const Entry& entry : old) {
    if (entry.state != kEmpty) insert(stripe, entry);
  }
}

void Shard::erase(Stripe& stripe, size_t slot) {
  const size_t mask = stripe.table.size() - 1;
  --stripe.used;
  if (stripe.table[slot].state == kTombstone) --stripe.tombstones;
  // Moves later entries of the probe path back, so that no path is ever cut by an empty slot.
  size_t hole = slot;
  for (size_t next = (slot + 1) & mask; stripe.table[next].state != kEmpty; next = (next + 1) & mask) {
    const size_t home = slot_of(stripe, stripe.table[next].key);
    if (((next - home) & mask) >= ((next - hole) & mask)) {
      stripe.table[hole] = stripe.table[next];
      hole = next;
    }
  }
  stripe.table[hole] = Entry{};
}

bool Shard::knows(const Stripe& stripe, const Key& key) {
  const size_t mask = stripe.table.size() - 1;
  size_t slot = slot_of(stripe, key);
  while (stripe.table[slot].state != kEmpty && !(stripe.table[slot].key == key)) slot = (slot + 1) & mask;
  return stripe.table[slot].state != kEmpty;
}

void Shard::check(const wire::CheckEntry* entries, size_t n, uint8_t* kept) {
  const auto lives = this->lives();
  for (size_t i = 0; i < n; ++i) {
    Stripe& stripe = stripe_of(entries[i].key);
    std::lock_guard lock(stripe.mutex);
    kept[i] = keeps(stripe, entries[i], *lives) ? 1 : 0;
  }
}

bool Shard::keeps(Stripe& stripe, const wire::CheckEntry& asked, const OwnerLives& lives) {
  const size_t mask = stripe.table.size() - 1;
  int n_owners = 0;
  for (size_t slot = slot_of(stripe, asked.key); stripe.table[slot].state != kEmpty;
       slot = (slot + 1) & mask) {
    const Entry& entry = stripe.table[slot];
    if (!(entry.key == asked.key)) continue;
    if (entry.state == kLive && mark_of(entry.location) == asked.mark) return true;
    n_owners += counts(entry, lives) ? 1 : 0;
  }
  return n_owners >= kMaxOwners;
}

void Shard::serve_held(Held held) {
  std::shared_ptr<const Held> next = held ? std::make_shared<const Held>(std::move(held)) : nullptr;
  const std::lock_guard lock(held_mutex_);
  held_.swap(next);  // the one before is let go of without the lock
}

void Shard::get_held(const Key* keys, size_t n, uint8_t* found, Location* locations) {
  std::fill_n(found, n, uint8_t{0});
  std::unique_lock lock(held_mutex_);
  const std::shared_ptr<const Held> held = held_;
  lock.unlock();
  if (held != nullptr) (*held)(keys, n, found, locations);
}

void Shard::doubt(const wire::DropEntry* entries, size_t n) {
  const uint64_t watched = watched_;
  for (size_t i = 0; i < n; ++i) {
    if (watched == 0 || entries[i].sequence != 0 || entries[i].owner != watched) continue;
    std::lock_guard lock(doubts_mutex_);
    if (doubted_.size() < kMaxDoubted) doubted_.insert(entries[i].key);
  }
}

void Shard::doubt(const Key* keys, size_t n) {
  const std::lock_guard lock(doubts_mutex_);
  for (size_t i = 0; i < n && doubted_.size() < kMaxDoubted; ++i) doubted_.insert(keys[i]);
}

std::vector<Key> Shard::take_doubted(size_t limit) {
  std::lock_guard lock(doubts_mutex_);
  std::vector<Key> taken;
  while (taken.size() < limit && !doubted_.empty()) {
    taken.push_back(*doubted_.begin());
    doubted_.erase(doubted_.begin());
  }
  return taken;
}

std::vector<SpareHolders::Called> Shard::take_called(size_t limit) {
  std::vector<SpareHolders::Called> taken;
  for (Stripe& stripe : stripes_) {
    const std::lock_guard lock(stripe.mutex);
    stripe.spares.take_called(limit, &taken);
  }
  return taken;
}

void Shard::drop(const wire::DropEntry* entries, size_t n, uint32_t now) {
  doubt(entries, n);
  const auto lives = this->lives();
  for (size_t i = 0; i < n; ++i) {
    Stripe& stripe = stripe_of(entries[i].key);
    std::lock_guard lock(stripe.mutex);
    drop_one(stripe, entries[i], *lives, now);
  }
}

void Shard::drop_one(Stripe& stripe, const wire::DropEntry& drop, const OwnerLives& lives, uint32_t now) {
  const size_t mask = stripe.table.size() - 1;
  if (drop.sequence != 0) stripe.spares.remove(drop.key, drop.owner);
  for (size_t slot = slot_of(stripe, drop.key); stripe.table[slot].state != kEmpty;
       slot = (slot + 1) & mask) {
    Entry& entry = stripe.table[slot];
    if (!(entry.key == drop.key) || entry.location.owner != drop.owner) continue;
    if (entry.state == kTombstone) {  // against a put between the two that is late
      const auto later = std::pair(drop.boot, drop.sequence);
      if (drop.sequence == 0 || later <= std::pair(entry.location.boot, entry.sequence)) return;
      std::tie(entry.location.boot, entry.sequence) = later;
      entry.stamp = now;
      return;
    }
    // of an owner that has begun a boot anew, which may not be known here yet, all that it says is later
    const bool is_later = drop.sequence != 0 && drop.boot > entry.location.boot;
    if (!is_later && !lives.is_one_life(drop.owner, entry.location.boot, drop.boot)) return;
    const bool is_any = drop.generation == wire::kAnyGeneration && drop.sequence != 0;
    if (!is_any && entry.location.generation != drop.generation) return;
    // an owner's own word is older than what it put since; generations don't tell, pages on disk have none
    const auto said = std::pair(drop.boot, drop.sequence);
    const auto known = std::pair(entry.location.boot, entry.sequence);
    if (drop.sequence != 0 && said < known) return;
    entry.state = kTombstone;
    note(entry, drop.sequence == 0 ? PageEvent::kEntryDoubted : PageEvent::kEntryDropped);
    if (drop.sequence != 0) std::tie(entry.location.boot, entry.sequence) = said;
    entry.stamp = now;
    ++stripe.tombstones;
    stripe.spares.call(drop.key, [&](uint64_t owner) { return lives.is_present(owner); });
    return;
  }
}

Shard::Stats Shard::stats() {
  Stats stats{};
  for (Stripe& stripe : stripes_) {
    std::lock_guard lock(stripe.mutex);
    stats.entries += stripe.used - stripe.tombstones;
    stats.tombstones += stripe.tombstones;
    stats.nbytes += stripe.table.size() * sizeof(Entry);
  }
  return stats;
}

}  // namespace p2pkv
