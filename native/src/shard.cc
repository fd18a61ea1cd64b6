#include "p2pkv/shard.h"

#include <algorithm>
#include <memory>

namespace p2pkv {
namespace {

enum EntryState : uint8_t { kEmpty = 0, kLive = 1, kTombstone = 2 };

constexpr size_t kFirstTable = 64;

}  // namespace

Shard::Shard(uint64_t max_entries)
    : max_entries_a_stripe_(std::max<uint64_t>(1, max_entries / kStripes)),
      owners_(std::make_shared<const Owners>()) {
  for (Stripe& stripe : stripes_) stripe.table.resize(kFirstTable);
}

std::shared_ptr<const Shard::Owners> Shard::owners() {
  std::lock_guard lock(owners_mutex_);
  return owners_;
}

void Shard::set_view(const uint64_t* owners, const uint64_t* boots, size_t n) {
  auto next = std::make_shared<Owners>();
  for (size_t i = 0; i < n; ++i) next->emplace(owners[i], boots[i]);
  std::lock_guard lock(owners_mutex_);
  owners_ = std::move(next);
}

void Shard::get(const Key* keys, size_t n, uint8_t* found, Location* locations) {
  const auto alive = owners();
  for (size_t i = 0; i < n; ++i) {
    Stripe& stripe = stripe_of(keys[i]);
    std::lock_guard lock(stripe.mutex);
    found[i] = 0;
    const size_t mask = stripe.table.size() - 1;
    for (size_t slot = slot_of(stripe, keys[i]); stripe.table[slot].state != kEmpty;
         slot = (slot + 1) & mask) {
      const Entry& entry = stripe.table[slot];
      if (entry.state != kLive || !(entry.key == keys[i])) continue;
      const auto owner = alive->find(entry.location.owner);
      if (owner == alive->end() || owner->second != entry.location.boot) continue;
      found[i] = 1;
      locations[i] = entry.location;
      if ((entry.location.flags & kResident) != 0) break;  // no other copy is nearer
    }
  }
}

void Shard::keep_present(const Location* locations, uint8_t* found, size_t n) {
  const auto alive = owners();
  for (size_t i = 0; i < n; ++i) {
    if (found[i] == 0) continue;
    const auto owner = alive->find(locations[i].owner);
    if (owner == alive->end() || owner->second != locations[i].boot) found[i] = 0;
  }
}

size_t Shard::put(const wire::PutEntry* entries, size_t n, uint32_t now) {
  size_t refused = 0;
  for (size_t i = 0; i < n; ++i) {
    Stripe& stripe = stripe_of(entries[i].key);
    std::lock_guard lock(stripe.mutex);
    if (!put_one(stripe, entries[i], now)) ++refused;
  }
  return refused;
}

bool Shard::put_one(Stripe& stripe, const wire::PutEntry& put, uint32_t now) {
  const size_t mask = stripe.table.size() - 1;
  int n_owners = 0;
  Entry* oldest = nullptr;
  for (size_t slot = slot_of(stripe, put.key); stripe.table[slot].state != kEmpty; slot = (slot + 1) & mask) {
    Entry& entry = stripe.table[slot];
    if (!(entry.key == put.key)) continue;
    if (entry.location.owner == put.location.owner) {
      const bool newer = put.location.boot > entry.location.boot ||
                         (put.location.boot == entry.location.boot && put.sequence > entry.sequence);
      if (!newer) return true;  // a late or repeated message: what is known is at least as new
      if (entry.state == kTombstone) --stripe.tombstones;
      entry.sequence = put.sequence;
      entry.location = put.location;
      entry.stamp = now;
      entry.state = kLive;
      return true;
    }
    ++n_owners;
    if (oldest == nullptr || entry.stamp < oldest->stamp) oldest = &entry;
  }
  const Entry fresh{put.key, put.sequence, put.location, now, kLive, {}};
  if (n_owners >= kMaxOwners) {
    if (oldest->state == kTombstone) --stripe.tombstones;
    *oldest = fresh;
    return true;
  }
  if (stripe.used >= max_entries_a_stripe_) return false;
  return insert(stripe, fresh);
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
  std::vector<Entry> old(stripe.table.size() * 2);
  old.swap(stripe.table);
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

void Shard::drop(const wire::DropEntry* entries, size_t n, uint32_t now) {
  for (size_t i = 0; i < n; ++i) {
    Stripe& stripe = stripe_of(entries[i].key);
    std::lock_guard lock(stripe.mutex);
    drop_one(stripe, entries[i], now);
  }
}

void Shard::drop_one(Stripe& stripe, const wire::DropEntry& drop, uint32_t now) {
  const size_t mask = stripe.table.size() - 1;
  for (size_t slot = slot_of(stripe, drop.key); stripe.table[slot].state != kEmpty;
       slot = (slot + 1) & mask) {
    Entry& entry = stripe.table[slot];
    if (entry.state != kLive || !(entry.key == drop.key) || entry.location.owner != drop.owner) continue;
    if (entry.location.boot != drop.boot || entry.location.generation != drop.generation) return;
    entry.state = kTombstone;
    entry.sequence = std::max(entry.sequence, drop.sequence);
    entry.stamp = now;
    ++stripe.tombstones;
    return;
  }
}

void Shard::sweep(uint32_t now) {
  const auto alive = owners();
  Stripe& stripe = stripes_[next_sweep_];
  next_sweep_ = (next_sweep_ + 1) % kStripes;
  std::lock_guard lock(stripe.mutex);
  for (size_t slot = 0; slot < stripe.table.size();) {
    const Entry& entry = stripe.table[slot];
    // Stored since `now` was taken: as young as can be, not 2^32 seconds old.
    const uint32_t age = now > entry.stamp ? now - entry.stamp : 0;
    bool gone = entry.state == kTombstone && age > kTombstoneSeconds;
    if (entry.state == kLive && age > kUnknownOwnerSeconds) {
      const auto owner = alive->find(entry.location.owner);
      gone = owner == alive->end() || owner->second != entry.location.boot;
    }
    // An erased slot may now hold the next entry of its probe path: look at it again.
    if (gone) {
      erase(stripe, slot);
    } else {
      ++slot;
    }
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
