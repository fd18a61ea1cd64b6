#include "pool/page_table.h"

namespace p2pkv {

PageTable::PageTable(uint32_t n_granules)
    // At most one page a granule, so the table is never more than half full and probes stay short.
    : pages_(n_granules), slots_(std::bit_ceil(size_t{2} * n_granules)), mask_(slots_.size() - 1) {}

uint32_t PageTable::find(const Key& key) const {
  const uint64_t hash = hash_of(key);
  const auto tag = static_cast<uint32_t>(hash);
  for (size_t i = home(hash); slots_[i].page != 0; i = (i + 1) & mask_) {
    if (slots_[i].tag != tag) continue;
    const uint32_t granule = slots_[i].page - 1;
    if (pages_[granule].key == key) return granule;
  }
  return kNone;
}

size_t PageTable::slot_of(uint32_t granule) const {
  size_t i = home(hash_of(pages_[granule].key));
  while (slots_[i].page != granule + 1) i = (i + 1) & mask_;
  return i;
}

void PageTable::insert(uint32_t granule) {
  const uint64_t hash = hash_of(pages_[granule].key);
  size_t i = home(hash);
  while (slots_[i].page != 0) i = (i + 1) & mask_;
  slots_[i] = {static_cast<uint32_t>(hash), granule + 1};
  ++size_;
}

void PageTable::erase(uint32_t granule) {
  size_t hole = slot_of(granule);
  // Later entries of the run move up into the hole unless that would put them before their home: no
  // tombstones.
  for (size_t i = (hole + 1) & mask_; slots_[i].page != 0; i = (i + 1) & mask_) {
    const size_t from_home = (i - home(slots_[i].tag)) & mask_;
    if (from_home >= ((i - hole) & mask_)) {
      slots_[hole] = slots_[i];
      hole = i;
    }
  }
  slots_[hole] = {0, 0};
  --size_;
}

}  // namespace p2pkv
