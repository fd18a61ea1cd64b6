// How a pool's memory outlives its process: what is left to a successor, and how that goes on with it.
#include <sys/stat.h>

#include <utility>

#include "page/words.h"
#include "pool/pool.h"

namespace p2pkv {

KeptRecords::Layout Pool::Plan::layout(int region) const {
  struct stat info{};
  fstat(region, &info);
  return {options.owner,   region_nbytes(),
          data_offset,     static_cast<uint64_t>(info.st_ino),
          options.granule, static_cast<uint32_t>(n_granules)};
}

std::shared_ptr<Pool> Pool::adopt(PoolOptions options, int pool, int records, WriterLock lock,
                                  std::string* error) {
  Plan made;
  if (!plan(std::move(options), &made, error)) return nullptr;
  auto kept = KeptRecords::adopt(records, std::move(lock), made.layout(pool), error);
  if (!kept) return nullptr;
  auto region = SharedRegion::adopt(pool, made.region_nbytes(), error);
  if (!region) return nullptr;
  std::vector<KeptRecords::Left> pages;
  std::vector<NamespaceEpoch> epochs;
  uint64_t greatest = 0;
  std::unique_ptr<PageIndex> index;
  if (!made.make_index(&index, error)) return nullptr;
  if (!kept->read(region->base(), &pages, &greatest, error)) return nullptr;
  if (!kept->read_epochs(&epochs)) {
    *error = "what it says of epochs is damaged";
    return nullptr;
  }
  // Generations go on above all that there ever were: every word has been one, or one more.
  auto adopted = std::shared_ptr<Pool>(
      new Pool(made, {std::move(region), std::move(kept), std::move(index)}, (greatest & ~uint64_t{1}) + 1));
  adopted->first_epochs_ = std::move(epochs);
  const KeptBoots boots = adopted->kept_->boots();
  if (boots.since != 0 && boots.since <= boots.last) adopted->first_boots_ = boots;
  if (adopted->take_left(pages)) return adopted;
  *error = "two of its pages have one key";
  return nullptr;
}

// False, and no word was changed, if a key is there twice.
bool Pool::take_left(const std::vector<KeptRecords::Left>& pages) {
  const Lock lock(mutex_);
  blocks_.adopt(pages);
  for (const KeptRecords::Left& left : pages) {
    if (pages_.find(left.page.key) != PageTable::kNone) return false;
    enter(left.granule);
  }
  for (const KeptRecords::Left& left : pages) {
    if (left.page.is_guest != 0) take_out(left.granule, PageEvent::kCleared);
  }
  return true;
}

bool Pool::leave_memory() {
  const Lock lock(mutex_);
  is_released_ = true;
  pins_.expire(INT64_MAX, [this](uint32_t granule) { unpin_page(granule); });
  uint64_t n_left = 0;
  bool is_copied_out = false;
  uint32_t at = 0;
  for (uint32_t page; (page = blocks_.next_page(&at, UINT32_MAX)) != PageBlocks::kNone;) {
    pages_.erase(page);  // and not from the index: who is shown this pool goes on reading it
    ++n_hidden_;
    n_left += blocks_.length_of(page);
    is_copied_out = is_copied_out || pages_[page].is_held();
    blocks_.leave(page);
  }
  if (is_copied_out || blocks_.n_used() > n_left) return false;
  unmap();
  return true;
}

void Pool::keep_epochs(const std::vector<NamespaceEpoch>& epochs) {
  const Lock lock(mutex_);
  if (kept_ && !is_released_) kept_->write_epochs(epochs);
}

void Pool::keep_boots(const KeptBoots& boots) {
  const Lock lock(mutex_);
  if (kept_ && !is_released_) kept_->write_boots(boots);
}

}  // namespace p2pkv
