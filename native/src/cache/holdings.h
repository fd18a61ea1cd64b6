// Says to who asks for it what a node has of its own.
#pragma once

#include <memory>

#include "directory/shard.h"
#include "pool/guests.h"
#include "pool/pool.h"

namespace p2pkv {

// Finds the pages of the pool, but no guests: whether these still count is for their owner to say. Nor those
// on disk: while a large store is cleared its catalog is locked for longer than who looks up may be kept.
// `guests` may be null.
Shard::Held holdings_of(std::shared_ptr<Pool> pool, std::shared_ptr<Guests> guests);

}  // namespace p2pkv
