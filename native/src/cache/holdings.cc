#include "cache/holdings.h"

#include <utility>

#include "disk/tier.h"

namespace p2pkv {

Shard::Held holdings_of(std::shared_ptr<Pool> pool, std::shared_ptr<Guests> guests,
                        std::shared_ptr<Tier> tier) {
  return [pool = std::move(pool), guests = std::move(guests), tier = std::move(tier)](
             const Key* keys, size_t n, uint8_t* found, Location* locations) {
    if (tier != nullptr) {
      tier->locate(keys, n, found, locations);
    } else {
      pool->lookup(keys, n, found, locations);
    }
    if (guests == nullptr || !guests->is_used()) return;
    for (size_t i = 0; i < n; ++i) {
      const bool is_here = found[i] != 0 && (locations[i].flags & kResident) != 0;
      if (is_here && guests->has(keys[i], locations[i].generation)) found[i] = 0;
    }
  };
}

}  // namespace p2pkv
