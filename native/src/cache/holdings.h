// Says to who asks for it what a node has of its own.
#pragma once

#include <memory>

#include "directory/shard.h"
#include "pool/guests.h"
#include "pool/pool.h"

namespace p2pkv {

// Finds the pages of the pool, but no guests: whether these still count is for their owner to say. What is
// not found then `behind` may find, which must not wait: the directory answers nobody else meanwhile.
// `guests` may be null, and `behind` empty.
Shard::Held holdings_of(std::shared_ptr<Pool> pool, std::shared_ptr<Guests> guests, Shard::Held behind);

}  // namespace p2pkv
