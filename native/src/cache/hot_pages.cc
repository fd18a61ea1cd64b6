#include "cache/hot_pages.h"

#include <algorithm>
#include <unordered_map>

namespace p2pkv {

void HotPages::note(const std::vector<Key>& keys, const std::vector<uint8_t>& hits) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  turn();
  for (size_t i = 0; i < keys.size(); ++i) {
    if (hits[i] != 0 && --until_next_ == 0) look_at(keys[i]);
  }
}

std::vector<HotPages::Hot> HotPages::list(size_t most) {
  struct Known {
    uint64_t count = 0;
    uint32_t n_looks = 0;
  };
  std::unordered_map<Key, Known, KeyHash> known;
  double seconds = 0;
  {
    const std::lock_guard lock(mutex_);
    turn();
    const auto add = [&](const Window& window) {
      for (const Place& place : window.places) {
        if (place.count <= place.over) continue;
        Known& page = known[place.key];
        page.count += place.count - place.over;
        page.n_looks += place.n_looks;
      }
    };
    add(now_);
    if (has_before_) add(before_);
    const int64_t ns = now_ns_() - now_.began_ns + (has_before_ ? kWindowNs : 0);
    seconds = std::max(1.0, static_cast<double>(ns) / 1e9);
  }
  std::vector<Hot> hot;
  for (const auto& [key, page] : known) {
    hot.push_back({key, static_cast<double>(page.count) / seconds, page.n_looks});
  }
  const auto is_hotter = [](const Hot& a, const Hot& b) { return a.reads_a_second > b.reads_a_second; };
  const size_t n = std::min(most, hot.size());
  std::partial_sort(hot.begin(), hot.begin() + static_cast<ptrdiff_t>(n), hot.end(), is_hotter);
  hot.resize(n);
  return hot;
}

void HotPages::turn() {
  const int64_t at = now_ns_();
  if (at - now_.began_ns < kWindowNs) return;
  has_before_ = at - now_.began_ns < 2 * kWindowNs;  // else nothing was noted in the last ten seconds
  if (has_before_) before_ = now_;
  now_ = Window{.began_ns = at};
  until_next_ = 1;
}

void HotPages::look_at(const Key& key) {
  Window& window = now_;
  const uint64_t hash = hash_of(key);
  const size_t set = (hash >> 32) % kSets;  // other bits than those that name a shard's stripe or slot
  const auto first = window.places.begin() + static_cast<ptrdiff_t>(set * kWays);
  const auto hashes = window.hashes.begin() + static_cast<ptrdiff_t>(set * kWays);
  uint8_t& n_places = window.n_places[set];
  const auto known = std::find(hashes, hashes + n_places, hash);
  auto place = first + (known - hashes);
  if (known == hashes + n_places) {
    if (n_places < kWays) {
      ++n_places;
    } else {
      const auto is_rarer = [](const Place& a, const Place& b) { return a.count < b.count; };
      place = std::min_element(first, first + kWays, is_rarer);
      place->over = place->count;
    }
    hashes[place - first] = hash;
    place->key = key;
    place->n_looks = 0;
  }
  place->count += window.weight;
  ++place->n_looks;
  if (++window.n_looks % kLooksAWeight == 0) window.weight = std::min(2 * window.weight, kMostWeight);
  until_next_ = 1 + static_cast<uint32_t>(chance_() % (2 * window.weight - 1));  // on the average its weight
}

}  // namespace p2pkv
