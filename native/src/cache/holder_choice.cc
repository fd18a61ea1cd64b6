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
  if (const Location* const passed = passed_over(page)) found.holders.push_back({*passed});
  OtherHolders::Others others;
  std::array<uint8_t, kMostHolders - 1> present;
  present.fill(1);
  const size_t n = others_.get(key, &others);
  shard_.keep_present(others.data(), present.data(), n);
  for (size_t i = 0; i < n; ++i) {
    const bool is_known = std::any_of(found.holders.begin(), found.holders.end(), [&](const Holder& holder) {
      return is_same(holder.location, others[i]);
    });
    if (present[i] != 0 && !is_known && is_readable(others[i], at)) found.holders.push_back({others[i]});
  }
  return found;
}

const Location* HolderChoice::passed_over(size_t page) const {
  const auto found = std::lower_bound(passed_over_.begin(), passed_over_.end(), page,
                                      [](const auto& known, size_t wanted) { return known.first < wanted; });
  return found != passed_over_.end() && found->first == page ? &found->second : nullptr;
}

bool HolderChoice::is_readable(const Location& other, const Location& at) const {
  const bool is_good = (other.flags & kResident) != 0 && can_prove(other);
  return is_good && other.length == at.length && other.owner != own_key_ && !is_same(other, at);
}

void HolderChoice::spread(const std::vector<size_t>& pages, const std::vector<Key>& keys,
                          std::vector<Location>* locations, HolderSpread& spread) {
  std::vector<uint8_t> n_known;
  std::vector<Location> others;
  others_.get(keys, pages, &n_known, &others);
  std::vector<uint8_t> present(others.size(), 1);
  shard_.keep_present(others.data(), present.data(), others.size());
  struct Shared {
    size_t page;
    size_t first;  // of its holders
    size_t n;
  };
  std::vector<Shared> shared;
  std::vector<Location> holders;
  uint64_t nbytes = 0;
  size_t next = 0;
  for (size_t i = 0; i < pages.size(); ++i) {
    const Location& at = (*locations)[pages[i]];
    const size_t first = holders.size();
    holders.push_back(at);
    for (const size_t end = next + n_known[i]; next < end; ++next) {
      if (present[next] != 0 && is_readable(others[next], at)) holders.push_back(others[next]);
    }
    if (holders.size() - first == 1) {
      holders.pop_back();
      continue;
    }
    shared.push_back({pages[i], first, holders.size() - first});
    nbytes += at.length;
  }
  if (shared.empty()) return;
  spread.know(holders, nbytes);
  for (const auto& [page, first, n] : shared) {
    const size_t chosen = spread.choose(&holders[first], n);
    if (chosen == 0) continue;
    passed_over_.emplace_back(page, (*locations)[page]);
    (*locations)[page] = holders[first + chosen];
  }
}

uint32_t HolderChoice::later_by(const PeerConnections::Standing& standing) {
  if (!standing.is_reachable || (standing.pace && standing.pace->is_slow())) return 2;
  return standing.is_connected ? 0 : 1;
}

bool HolderChoice::has_next(size_t page, const Key& key, const Location& at) {
  const Page& known = of(page, key, at);
  if (known.n_tries >= kMostTries) return false;
  return std::any_of(known.holders.begin(), known.holders.end(), [&](const Holder& holder) {
    return is_worth_a_try(holder) && !is_same(holder.location, at);
  });
}

bool HolderChoice::has_untried(size_t page, const Key& key, const Location& at) {
  if (!pages_.contains(page) && passed_over(page) == nullptr && !others_.may_know(key)) return false;
  const Page& known = of(page, key, at);
  if (known.n_tries >= kMostTries) return false;
  return std::any_of(known.holders.begin(), known.holders.end(), [&](const Holder& holder) {
    return holder.fate == Fate::kUntried && !is_same(holder.location, at);
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
    constexpr uint32_t kAfterAll = 1 << 8;
    if (holder.fate == Fate::kLate) return kAfterAll + holder.last_try;
    return later_by_(holder.location.owner, holder.location.boot);
  };
  const Holder* best = nullptr;
  uint32_t least = 0;
  for (const Holder& holder : known.holders) {
    if (!is_worth_a_try(holder)) continue;
    const uint32_t ranked = rank(holder);
    if (best != nullptr && ranked >= least) continue;
    best = &holder;
    least = ranked;
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
