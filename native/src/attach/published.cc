#include "attach/published.h"

#include <utility>

namespace p2pkv::attaching {

Published::Published(Attachment::Answer given, const Key* keys, const RingTable& ring)
    : answer(std::move(given)), is_known(answer.is_found.size()) {
  for (size_t page = 0; page < is_known.size(); ++page) {
    count(page);
    if (answer.is_found[page] == 0) continue;
    ++n_found;
    is_known[page] = answer.is_told[page];
    n_known += is_known[page];
    look_for_owners(page, keys[page], ring);
  }
}

void Published::count(size_t page) {
  switch (answer.statuses[page]) {
    case PoolStatus::kStored:
      stored_bytes += answer.locations[page].length;
      break;
    case PoolStatus::kExists:
      break;
    case PoolStatus::kNoRoom:
      ++n_no_room;
      break;
    case PoolStatus::kChanged:
      ++n_changed;
      break;
    case PoolStatus::kTimedOut:
      ++n_late;
      break;
    case PoolStatus::kNotTried:
      ++n_not_tried;
      break;
    case PoolStatus::kOtherLength:
    case PoolStatus::kTooLarge:
      if (!misfit) misfit = page;
      break;
  }
}

// A node that takes itself for an owner, or not, where this ring says otherwise goes by another view.
void Published::look_for_owners(size_t page, const Key& key, const RingTable& ring) {
  bool is_nodes = false, has_others = ring.points.empty();
  const int32_t* owners = has_others ? nullptr : ring.owners_of(key);
  for (size_t i = 0; !has_others && i < ring.replicas && owners[i] >= 0; ++i) {
    is_nodes = is_nodes || owners[i] == ring.own_index;
    has_others = owners[i] != ring.own_index;
  }
  if (has_others || is_nodes != (is_known[page] != 0)) is_told = false;
}

}  // namespace p2pkv::attaching
