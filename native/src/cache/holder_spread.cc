#include "cache/holder_spread.h"

#include <algorithm>
#include <cmath>

namespace p2pkv {
namespace {

// Has each bit of the result depend on each bit of the value (the finalizer of SplitMix64).
uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58'476d'1ce4'e5b9;
  value = (value ^ (value >> 27)) * 0x94d0'49bb'1331'11eb;
  return value ^ (value >> 31);
}

}  // namespace

const HolderSpread::Holder& HolderSpread::of(const Location& location) {
  const auto found = std::find_if(known_.begin(), known_.end(), [&](const Holder& holder) {
    return holder.owner == location.owner && holder.boot == location.boot;
  });
  if (found != known_.end()) return *found;
  const uint64_t bits = mix(mix(draw_) ^ location.owner) >> 11;        // 53 of them
  const double uniform = (static_cast<double>(bits) + 0.5) * 0x1p-53;  // between 0 and 1, and neither
  known_.push_back(
      {location.owner, location.boot, usual_ns_(location.owner, location.boot), -std::log(uniform)});
  return known_.back();
}

size_t HolderSpread::choose(const Location* holders, size_t n) {
  int64_t fastest_ns = 0;
  for (size_t i = 0; i < n; ++i) {
    const int64_t ns = of(holders[i]).usual_ns;
    if (ns > 0 && (fastest_ns == 0 || ns < fastest_ns)) fastest_ns = ns;
  }
  size_t first = 0;
  double least = 0;
  for (size_t i = 0; i < n; ++i) {
    const Holder& holder = of(holders[i]);
    const bool is_slower = holder.usual_ns > kAlike * fastest_ns;
    const double alike_ns = static_cast<double>(kAlike * fastest_ns);
    const double weight =
        is_slower ? std::max(alike_ns / static_cast<double>(holder.usual_ns), kLeastWeight) : 1.0;
    const double wait = holder.wait / weight;
    if (i > 0 && wait >= least) continue;
    least = wait;
    first = i;
  }
  return first;
}

}  // namespace p2pkv
