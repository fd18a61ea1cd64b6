#include "cache/holdings.h"

#include <utility>

namespace p2pkv {

Shard::Held holdings_of(std::shared_ptr<Pool> pool, std::shared_ptr<Guests> guests, Shard::Held behind) {
  return [pool = std::move(pool), guests = std::move(guests), behind = std::move(behind)](
             const Key* keys, size_t n, uint8_t* found, Location* locations) {
    pool->lookup(keys, n, found, locations);
    if (guests != nullptr) guests->leave_out(keys, locations, n, found);
    if (behind) behind(keys, n, found, locations);
  };
}

}  // namespace p2pkv
