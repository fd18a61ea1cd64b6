// Some entries of a shard count no more: those of pages whose owner is not in the view, and those of keys
// that other shards answer for now. They are passed over at once, and taken out stripe by stripe.
#include <algorithm>
#include <memory>
#include <utility>

#include "directory/shard.h"

namespace p2pkv {

void Shard::set_view(const uint64_t* owners, const uint64_t* boots, size_t n) {
  std::vector<OwnerLives::Life> lives;
  for (size_t i = 0; i < n; ++i) lives.push_back({owners[i], boots[i], boots[i]});
  set_view(lives);
}

void Shard::set_view(const std::vector<OwnerLives::Life>& lives) {
  auto next = std::make_shared<const OwnerLives>(lives);
  std::lock_guard lock(lives_mutex_);
  lives_ = std::move(next);
}

void Shard::set_rings(std::vector<std::shared_ptr<const RingTable>> rings) {
  // a node that is in no ring has no place in the view, and is soon told so: nothing follows from it
  std::erase_if(rings, [](const auto& ring) { return ring->own_index < 0; });
  auto next = rings.empty() ? nullptr : std::make_shared<const Rings>(std::move(rings));
  // What was a leftover stays one, even if its key comes back to this shard.
  if (const Leftovers left = leftovers(now()); left.may_be()) {
    for (Stripe& stripe : stripes_) erase_leftovers(stripe, left);
  }
  std::lock_guard lock(lives_mutex_);
  rings_ = std::move(next);
  look_for_leftovers();
}

std::shared_ptr<const Shard::Rings> Shard::rings() {
  std::lock_guard lock(lives_mutex_);
  return rings_;
}

bool Shard::has_place_in(const Rings& rings, const Key& key) {
  return std::any_of(rings.begin(), rings.end(), [&](const auto& ring) { return ring->is_own(key); });
}

Shard::Leftovers Shard::leftovers(uint32_t now) {
  if (n_unswept_ == 0) return {};
  std::lock_guard lock(lives_mutex_);
  if (!is_up_to_date(now)) return {};
  return {rings_, now};
}

bool Shard::Leftovers::is_foreign(const Entry& entry) const {
  return rings_ != nullptr && entry.state == kLive && !has_place_in(*rings_, entry.key);
}

bool Shard::Leftovers::is_fresh(const Entry& entry) const {
  return now_ <= entry.stamp || now_ - entry.stamp <= kFreshSeconds;
}

bool Shard::is_up_to_date(uint32_t now) const {
  // Confirmed since `now` was taken: 2^32 seconds ago would be as good.
  const uint32_t unconfirmed = now > confirmed_at_ ? now - confirmed_at_ : 0;
  return is_confirmed_ && unconfirmed <= kConfirmedSeconds;
}

void Shard::confirm_view(uint32_t now) {
  std::lock_guard lock(lives_mutex_);
  if (!is_confirmed_ || now - confirmed_at_ > kConfirmedSeconds) confirmed_since_ = now;
  is_confirmed_ = true;
  confirmed_at_ = now;
}

bool Shard::knows_everybody(uint32_t now) {
  std::lock_guard lock(lives_mutex_);
  const uint32_t confirmed = now > confirmed_since_ ? now - confirmed_since_ : 0;
  return is_up_to_date(now) && confirmed > kUnknownOwnerSeconds;
}

void Shard::sweep(uint32_t now) {
  Stripe& stripe = stripes_[next_sweep_];
  next_sweep_ = (next_sweep_ + 1) % kStripes;
  if (const Leftovers left = leftovers(now); left.may_be()) {
    size_t n_unswept = n_unswept_;
    if (erase_leftovers(stripe, left)) {
      look_for_leftovers();  // one round more
    } else {
      n_unswept_.compare_exchange_strong(n_unswept, n_unswept - 1);  // unless more have come meanwhile
    }
  }
  const auto lives = this->lives();
  const bool drops_unknown = knows_everybody(now);
  std::lock_guard lock(stripe.mutex);
  // Those whose last entry went in the sweep before: who was called has had its time.
  stripe.spares.remove_if([&](const Key& key) { return !knows(stripe, key); });
  erase_if(stripe, [&](Entry& entry) {
    // Stored since `now` was taken: as young as can be, not 2^32 seconds old.
    const uint32_t age = now > entry.stamp ? now - entry.stamp : 0;
    if (entry.state == kTombstone) return age > kTombstoneSeconds;
    if (counts(entry, *lives)) {
      entry.is_missed = 0;
      return false;
    }
    const bool has_room = stripe.used < max_entries_a_stripe_ / 8 * 7;
    const bool is_waited_for = has_room && lives->may_come_back(entry.location);
    if (!is_waited_for && (!drops_unknown || age <= kUnknownOwnerSeconds)) return false;
    if (entry.is_missed == 0) {
      stripe.spares.call(entry.key, [&](uint64_t owner) { return lives->is_present(owner); });
    }
    entry.is_missed = 1;
    if (!is_waited_for) note(entry, PageEvent::kOwnerGone);
    return !is_waited_for;
  });
}

bool Shard::erase_leftovers(Stripe& stripe, const Leftovers& left) {
  bool will_be_more = false;
  std::lock_guard lock(stripe.mutex);
  erase_if(stripe, [&](const Entry& entry) {
    if (!left.is_foreign(entry)) return false;
    will_be_more |= left.is_fresh(entry);
    if (left.is_fresh(entry)) return false;
    stripe.spares.remove(entry.key);
    return true;
  });
  return will_be_more;
}

template <typename IsGone>
void Shard::erase_if(Stripe& stripe, IsGone is_gone) {
  for (size_t slot = 0; slot < stripe.table.size();) {
    // An erased slot may now hold the next entry of its probe path: it is looked at again.
    if (stripe.table[slot].state != kEmpty && is_gone(stripe.table[slot])) {
      erase(stripe, slot);
    } else {
      ++slot;
    }
  }
}

}  // namespace p2pkv
