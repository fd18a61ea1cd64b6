// How a pool's memory outlives its process: what is left to a successor, and how that goes on with it.
#include <sys/stat.h>

#include <utility>

#include "page/words.h"
#include "pool/pool.h"

namespace p2pkv {
namespace {

// A page of memory holds so many records of pages: where one of them is used on average, all memory is.
constexpr uint64_t kRecordsAPage = 4096 / sizeof(Page);

}  // namespace

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
  std::vector<NamespaceEpoch> epochs;
  uint64_t greatest = 0;
  uint32_t n_pages = 0;
  std::unique_ptr<PageIndex> index;
  if (!made.make_index(&index, error)) return nullptr;
  if (!kept->read_words(region->base(), &greatest, &n_pages, error)) return nullptr;
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
  return adopted->take_left(n_pages, error) ? adopted : nullptr;
}

// False, with the reason in `error`, and no word was changed, if one of the `n_pages` can't be right.
bool Pool::take_left(uint32_t n_pages, std::string* error) {
  const Lock lock(mutex_);
  if (uint64_t{n_pages} * kRecordsAPage >= blocks_.n_granules()) {
    pages_.expect_filling();
    blocks_.expect_filling();
  }
  std::vector<KeptRecords::Left> pages;
  pages.reserve(n_pages);
  if (!kept_->read(region_->base(), &pages_, &pages, error)) return false;
  blocks_.adopt(pages);
  std::vector<uint32_t> guests;
  for (size_t i = 0; i < pages.size(); ++i) {
    if (i + PageTable::kAhead < pages.size()) prefetch(pages_[pages[i + PageTable::kAhead].granule].key);
    const uint32_t granule = pages[i].granule;
    if (pages_.find(pages_[granule].key) != PageTable::kNone) {
      *error = "two of its pages have one key";
      return false;
    }
    enter(granule);
    if (pages_[granule].is_guest != 0) guests.push_back(granule);
  }
  for (const uint32_t guest : guests) take_out(guest, PageEvent::kCleared);
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

void Pool::map_behind() {
  const Lock lock(mutex_);
  if (!is_released_) region_->map_behind();
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
