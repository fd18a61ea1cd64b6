// Pages that come into the pool from elsewhere than a caller's memory: promotions of the disk tier.
#include "pool/pool.h"

namespace p2pkv {

void Pool::reserve_blocks(Block* blocks, size_t n, PoolStatus* statuses, const Deadline& deadline) {
  {
    const Lock lock(mutex_);
    expire_pins();
    Room room{deadline};
    for (size_t i = 0; i < n; ++i) {
      Draft draft;
      draft.length = blocks[i].length;
      draft.packed.nbytes = blocks[i].packed;
      statuses[i] = reserve(blocks[i].key, &draft, &room);
      if (statuses[i] == PoolStatus::kStored) {
        blocks[i].granule = draft.granule;
        blocks[i].data = data_at(draft.granule);
      } else if (draft.granule != PageBlocks::kNone) {
        --pages_[draft.granule].n_copies;  // what is there needs no hold here
      }
    }
  }
  log_.announce();
}

void Pool::commit_blocks(const Block* blocks, size_t n, const uint8_t* is_filled, double lease_seconds,
                         uint8_t* found, uint64_t* tickets, Location* locations) {
  const Lock lock(mutex_);
  const int64_t deadline_ns = lease_end(lease_seconds);
  // from the back, so that the front of the batch counts as used last
  for (size_t i = n; i-- > 0;) {
    found[i] = 0;
    tickets[i] = 0;
    locations[i] = Location{};
    if (is_filled[i] != 0) {
      const Draft draft{blocks[i].granule, blocks[i].length, blocks[i].checksum, {blocks[i].packed}, 0,
                        blocks[i].is_guest};
      const PoolStatus status = commit(blocks[i].key, draft, &locations[i]);
      found[i] = status == PoolStatus::kStored || status == PoolStatus::kExists;
      if (found[i] != 0 && lease_seconds > 0) tickets[i] = pin_one(pages_.find(blocks[i].key), deadline_ns);
    } else {
      blocks_.drop(blocks[i].granule);
    }
  }
}

size_t Pool::touch(const Key* keys, size_t n) {
  size_t n_there = 0;
  const Lock lock(mutex_);
  for (size_t i = n; i-- > 0;) {
    const uint32_t granule = pages_.find(keys[i]);
    if (granule == PageTable::kNone) continue;
    blocks_.touch(granule);
    ++n_there;
  }
  return n_there;
}

void Pool::list_oldest(size_t max, uint64_t nbytes, std::vector<Key>* keys) {
  const Lock lock(mutex_);
  if (max == 0) return;
  blocks_.walk_oldest([&](uint32_t granule) {
    const uint64_t block = block_nbytes(granule);
    if (block > nbytes) return false;
    nbytes -= block;
    keys->push_back(pages_[granule].key);
    return keys->size() < max;
  });
}

}  // namespace p2pkv
