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
  const auto passed = std::lower_bound(passed_over_.begin(), passed_over_.end(), page,
                                       [](const auto& known, size_t wanted) { return known.first < wanted; });
  if (passed != passed_over_.end() && passed->first == page) found.holders.push_back({passed->second});
  OtherHolders::Others others;
  const size_t n = readable_others(key, at, &others);
  for (size_t i = 0; i < n; ++i) found.holders.push_back({others[i]});
  return found;
}

size_t HolderChoice::readable_others(const Key& key, const Location& at, OtherHolders::Others* others) {
  const size_t n = others_.get(key, others);
  std::array<uint8_t, kMostHolders - 1> present;
  present.fill(1);
  shard_.keep_present(others->data(), present.data(), n);
  size_t n_kept = 0;
  for (size_t i = 0; i < n; ++i) {
    const Location other = (*others)[i];
    const bool is_readable = (other.flags & kResident) != 0 && can_prove(other);
    if (present[i] == 0 || !is_readable || other.length != at.length || other.owner == own_key_) continue;
    if (!is_same(other, at)) (*others)[n_kept++] = other;
  }
  return n_kept;
}

std::optional<Location> HolderChoice::instead_of(size_t page, const Key& key, const Location& at,
                                                 HolderSpread& spread) {
  OtherHolders::Others others;
  const size_t n_others = others_.may_know(key) ? readable_others(key, at, &others) : 0;
  if (n_others == 0) return std::nullopt;
  std::array<Location, kMostHolders> all{at};
  std::copy(others.begin(), others.begin() + static_cast<ptrdiff_t>(n_others), all.begin() + 1);
  const size_t chosen = spread.choose(all.data(), 1 + n_others);
  if (chosen == 0) return std::nullopt;
  passed_over_.emplace_back(page, at);
  return all[chosen];
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
