// What a node has of its own, as it says to who asks for it.
#pragma once

#include <memory>

#include "directory/shard.h"
#include "pool/guests.h"
#include "pool/pool.h"

namespace p2pkv {

class Tier;

// Finds the pages of the pool, and those on disk if there is a tier, but no guests: whether these still count
// is for their owner to say. `guests` and `tier` may be null.
Shard::Held holdings_of(std::shared_ptr<Pool> pool, std::shared_ptr<Guests> guests,
                        std::shared_ptr<Tier> tier);

}  // namespace p2pkv
