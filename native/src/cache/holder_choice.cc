#include "cache/holder_choice.h"

#include <algorithm>

#include "page/packed_location.h"

namespace p2pkv {
namespace {

bool is_same(const Location& a, const Location& b) {
  return a.owner == b.owner && a.boot == b.boot && a.generation == b.generation && a.offset == b.offset;
}

}  // namespace

HolderChoice::Page& HolderChoice::of(size_t page, const Key& key, const Location& at) {
  const auto [known, is_new] = pages_.try_emplace(page);
  Page& found = known->second;
  if (!is_new) return found;
  found.holders.push_back({at});
  OtherHolders::Others others;
  const size_t n = others_.get(key, &others);
  std::array<uint8_t, kMostHolders - 1> present;
  present.fill(1);
  shard_.keep_present(others.data(), present.data(), n);
  for (size_t i = 0; i < n; ++i) {
    const Location& other = others[i];
    const bool is_readable = (other.flags & kResident) != 0 && can_prove(other);
    if (present[i] == 0 || !is_readable || other.length != at.length || other.owner == own_key_) continue;
    if (!is_same(other, at)) found.holders.push_back({other});
  }
  return found;
}

bool HolderChoice::has_next(size_t page, const Key& key, const Location& at) {
  const Page& known = of(page, key, at);
  if (known.n_tries >= kMostTries) return false;
  return std::any_of(known.holders.begin(), known.holders.end(), [&](const Holder& holder) {
    return holder.fate != Fate::kGone && !is_same(holder.location, at);
  });
}

std::optional<Location> HolderChoice::next(size_t page, const Key& key, const Location& at, Fate fate) {
  Page& known = of(page, key, at);
  ++known.n_tries;
  for (Holder& holder : known.holders) {
    if (!is_same(holder.location, at)) continue;
    holder.fate = fate;
    holder.last_try = known.n_tries;
  }
  if (known.n_tries >= kMostTries) return std::nullopt;
  const auto rank = [&](const Holder& holder) -> uint32_t {
    if (holder.fate == Fate::kLate) return 2 + holder.last_try;
    return is_slow_(holder.location.owner, holder.location.boot) ? 1 : 0;
  };
  const Holder* best = nullptr;
  for (const Holder& holder : known.holders) {
    if (holder.fate == Fate::kGone) continue;
    if (best == nullptr || rank(holder) < rank(*best)) best = &holder;
  }
  return best != nullptr ? std::optional(best->location) : std::nullopt;
}

void HolderChoice::remember(size_t page, const Key& key, const Location& at) {
  std::vector<Location> rest;
  for (const Holder& holder : of(page, key, at).holders) {
    if (holder.fate != Fate::kGone && !is_same(holder.location, at)) rest.push_back(holder.location);
  }
  others_.put(key, rest.data(), rest.size());
}

uint32_t HolderChoice::n_tries(size_t page) const {
  const auto known = pages_.find(page);
  return known != pages_.end() ? known->second.n_tries : 0;
}

}  // namespace p2pkv
