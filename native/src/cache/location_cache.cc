#include "cache/location_cache.h"

#include <algorithm>
#include <bit>

namespace p2pkv {

LocationCache::LocationCache(size_t capacity, double ttl, int64_t (*now_ns)())
    : ttl_ns_(static_cast<int64_t>(std::clamp(ttl, 0.0, 86400.0) * 1e9)),
      now_ns_(now_ns),
      sets_(std::bit_ceil((std::max<size_t>(capacity, 1) + kWays - 1) / kWays)),
      locations_(sets_.size() * kWays),
      mask_(sets_.size() - 1) {}

size_t LocationCache::find(const Set& set, const Key& key) {
  for (size_t way = 0; way < kWays; ++way) {
    if (set.expires_ns[way] != 0 && set.keys[way] == key) return way;
  }
  return kWays;
}

void LocationCache::put(const Key* keys, const Location* locations, size_t n) {
  const int64_t expires_ns = now_ns_() + ttl_ns_;
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < n; ++i) {
    const size_t index = set_of(keys[i]);
    Set& set = sets_[index];
    size_t way = find(set, keys[i]);
    // An empty way has expiry 0, so it is taken first.
    if (way == kWays) way = std::min_element(set.expires_ns, set.expires_ns + kWays) - set.expires_ns;
    set.keys[way] = keys[i];
    set.expires_ns[way] = expires_ns;
    locations_[index * kWays + way] = locations[i];
  }
}

void LocationCache::get(const Key* keys, size_t n, uint8_t* found, Location* locations) {
  const int64_t now_ns = now_ns_();
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < n; ++i) {
    const auto* set = reinterpret_cast<const char*>(&sets_[set_of(keys[i])]);
    for (size_t line = 0; line < sizeof(Set); line += 64) __builtin_prefetch(set + line);
  }
  for (size_t i = 0; i < n; ++i) {
    const size_t index = set_of(keys[i]);
    const size_t way = find(sets_[index], keys[i]);
    found[i] = way != kWays && sets_[index].expires_ns[way] > now_ns;
    locations[i] = found[i] ? locations_[index * kWays + way] : Location{};
  }
}

void LocationCache::drop(const Key* keys, size_t n) {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < n; ++i) {
    Set& set = sets_[set_of(keys[i])];
    const size_t way = find(set, keys[i]);
    if (way != kWays) set.expires_ns[way] = 0;
  }
}

void LocationCache::drop_owner(uint64_t owner) {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < locations_.size(); ++i) {
    int64_t& expires_ns = sets_[i / kWays].expires_ns[i % kWays];
    if (expires_ns != 0 && locations_[i].owner == owner) expires_ns = 0;
  }
}

size_t LocationCache::size() {
  const int64_t now_ns = now_ns_();
  const std::lock_guard lock(mutex_);
  size_t n = 0;
  for (size_t i = 0; i < locations_.size(); ++i) n += sets_[i / kWays].expires_ns[i % kWays] > now_ns;
  return n;
}

}  // namespace p2pkv
