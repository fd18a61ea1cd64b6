// A page of a batch is read from one of its holders first, and from another one if that does not bring it.
#include <algorithm>

#include "cache/fetch_batch.h"

namespace p2pkv {

void FetchBatch::spread(HolderChoice& choice, HolderSpread& spread) {
  std::vector<size_t> pages;
  for (size_t page = 0; page < n_pages(); ++page) {
    // A page that lies on a disk was asked for already: it comes from there.
    if (states_[page] != State::kLocated || (locations_[page].flags & kResident) == 0) continue;
    if (choice.may_choose(keys_[page], locations_[page])) pages.push_back(page);
  }
  if (!pages.empty()) choice.spread(pages, keys_, &locations_, spread);
}

bool FetchBatch::has_elsewhere(const Owner& owner, HolderChoice& choice) const {
  return std::any_of(owner.pages.begin(), owner.pages.end(), [&](size_t page) {
    return hits_[page] == 0 && choice.has_next(page, keys_[page], locations_[page]);
  });
}

bool FetchBatch::has_untried(const Owner& owner, HolderChoice& choice) const {
  return std::any_of(owner.pages.begin(), owner.pages.end(), [&](size_t page) {
    return hits_[page] == 0 && choice.has_untried(page, keys_[page], locations_[page]);
  });
}

void FetchBatch::reroute(const Owner& owner, HolderChoice::Fate fate, HolderChoice& choice,
                         std::vector<const Owner*>* rerouted) {
  const size_t first = rerouted->size();
  const auto group_of = [&](const Location& location) -> Owner& {
    const auto known = std::find_if(rerouted_.begin(), rerouted_.end(), [&](const Owner& other) {
      const bool is_same = other.key == location.owner && other.boot == location.boot;
      return is_same && std::find(rerouted->begin() + static_cast<ptrdiff_t>(first), rerouted->end(),
                                  &other) != rerouted->end();
    });
    if (known != rerouted_.end()) return *known;
    rerouted_.push_back(Owner{location.owner, location.boot, {}, {}});
    rerouted->push_back(&rerouted_.back());
    return rerouted_.back();
  };
  for (const size_t page : owner.pages) {
    if (hits_[page] != 0 || states_[page] != State::kSettled) continue;
    const auto why = static_cast<Miss>(miss_kinds_[page]);
    const bool may_come = why == kTimedOut || why == kPeerLost;
    const Location at = locations_[page];
    const auto next = choice.next(page, keys_[page], at, may_come ? fate : HolderChoice::Fate::kGone);
    if (!next) continue;
    // A holder with a disk knows best where the page is, and tells the directory itself.
    if (why == kRejected && (at.flags & kHasDisk) == 0) {
      stale_keys_.push_back(keys_[page]);
      stale_.push_back(at);
    }
    locations_[page] = *next;
    states_[page] = State::kLocated;
    Owner& to = group_of(*next);
    group(page, &to);
    to.n_tries = std::max(to.n_tries, choice.n_tries(page));
    rerouted_pages_.push_back(page);
  }
}

bool FetchBatch::has_cached(const Owner& owner) const {
  return std::any_of(owner.pages.begin(), owner.pages.end(), [&](size_t page) {
    return hits_[page] == 0 && (is_looked_up_.empty() || is_looked_up_[page] == 0);
  });
}

bool FetchBatch::is_worth_another_look() const {
  for (size_t page = 0; page < n_pages(); ++page) {
    if (hits_[page] != 0 || states_[page] != State::kSettled) continue;
    if (miss_kinds_[page] == kRejected || miss_kinds_[page] == kPeerLost) return true;
  }
  return false;
}

void FetchBatch::give_up(const Owner& owner) {
  for (const size_t page : owner.pages) {
    if (hits_[page] == 0 && miss_kinds_[page] == kTimedOut) miss_kinds_[page] = kPeerLost;
  }
}

void FetchBatch::remember_rerouted(LocationCache* cache, HolderChoice& choice) const {
  for (const size_t page : rerouted_pages_) {
    if (hits_[page] == 0) continue;
    cache->put(&keys_[page], &locations_[page], 1);
    choice.remember(page, keys_[page], locations_[page]);
  }
}

}  // namespace p2pkv
