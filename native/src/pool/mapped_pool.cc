#include "pool/mapped_pool.h"

#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "base/checksum.h"
#include "base/copy.h"
#include "base/copy_team.h"
#include "codec/packed.h"
#include "page/words.h"

namespace p2pkv {
namespace {

// Chains are of two pages on average; one that is followed while it changes may lead into others. A guess.
constexpr int kMostSteps = 64;
constexpr size_t kPrefaultStep = size_t{2} << 20;  // a huge page
// It takes the kernel a tenth of a second a GiB to clear memory away.
constexpr size_t kUnmappedBehind = size_t{64} << 20;

// Others may write to it meanwhile: what was read counts only once it is proven, a page by its word.
template <typename T>
__attribute__((no_sanitize("thread"), noinline)) void copy_words(const void* from, T* to) {
  static_assert(sizeof(T) % sizeof(uint64_t) == 0);
  const auto* words = static_cast<const volatile uint64_t*>(from);
  uint64_t copied[sizeof(T) / sizeof(uint64_t)];
  for (size_t i = 0; i < std::size(copied); ++i) copied[i] = words[i];
  std::memcpy(to, copied, sizeof *to);
}

std::unique_ptr<ReadOnlyMapping> map_whole(int fd, size_t at_least, std::string* error) {
  struct stat info{};
  if (fstat(fd, &info) != 0 || static_cast<size_t>(info.st_size) < at_least) {
    *error = "the host's node has shown memory that is too short";
    return nullptr;
  }
  return ReadOnlyMapping::map(fd, static_cast<size_t>(info.st_size), error);
}

std::shared_ptr<MappedRegion> map_region(int fd, std::shared_ptr<MappedRegion> known, std::string* error) {
  struct stat info{};
  const bool is_known = fstat(fd, &info) == 0;
  const MappedRegion::Name name{info.st_dev, info.st_ino};
  // No other memfd has this name while that one is mapped.
  if (is_known && known && known->name() == name) return known;
  auto mapping = map_whole(fd, 1, error);
  if (!mapping) return nullptr;
  return std::make_shared<MappedRegion>(std::move(mapping), name);
}

}  // namespace

MappedRegion::~MappedRegion() {
  is_over_ = true;
  thread_.join();
  if (nbytes() >= kUnmappedBehind)
    NamedThread::run_behind("p2pkv-unmap", [mapping = std::move(mapping_)]() mutable { mapping.reset(); });
}

void MappedRegion::map_in() {
  std::call_once(begun_, [this] {
    thread_.start("p2pkv-prefault", [this] {
      for (size_t at = 0; at < nbytes() && !is_over_.load(std::memory_order_relaxed); at += kPrefaultStep)
        mapping_->prefault(at, std::min(kPrefaultStep, nbytes() - at));
    });
  });
}

MappedPool::MappedPool(const PageIndexHeader& about, std::unique_ptr<ReadOnlyMapping> index,
                       std::unique_ptr<ReadOnlyMapping> records, std::shared_ptr<MappedRegion> region)
    : index_(std::move(index)),
      records_(std::move(records)),
      region_(std::move(region)),
      about_(about),
      boot_(&reinterpret_cast<const PageIndexHeader*>(index_->base())->boot),
      heads_(reinterpret_cast<const uint32_t*>(index_->base() + kIndexChainsOffset)),
      next_(heads_ + about_.n_buckets) {}

std::shared_ptr<MappedPool> MappedPool::map(int index, int records, int region,
                                            std::shared_ptr<MappedRegion> known, std::string* error) {
  auto mapped_index = map_whole(index, kIndexChainsOffset, error);
  if (!mapped_index) return nullptr;
  auto mapped_records = map_whole(records, kRecordsOffset, error);
  if (!mapped_records) return nullptr;
  auto mapped_region = map_region(region, std::move(known), error);
  if (!mapped_region) return nullptr;
  PageIndexHeader about;
  copy_words(mapped_index->base(), &about);
  const uint64_t words = uint64_t{about.n_granules} * sizeof(uint64_t);
  if (!std::has_single_bit(about.n_buckets) ||
      mapped_index->nbytes() < index_nbytes(about.n_buckets, about.n_granules) ||
      mapped_records->nbytes() < records_nbytes(about.n_granules) ||
      // A region of huge pages is longer than what lies in it.
      mapped_region->nbytes() < about.region_nbytes || about.data_offset < words ||
      about.data_offset > about.region_nbytes ||
      about.region_nbytes - about.data_offset < uint64_t{about.n_granules} * about.granule) {
    *error = "the memory of the host's node does not fit together";
    return nullptr;
  }
  return std::shared_ptr<MappedPool>(
      new MappedPool(about, std::move(mapped_index), std::move(mapped_records), std::move(mapped_region)));
}

uint64_t MappedPool::boot() const {
  return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(*boot_)).load(std::memory_order_acquire);
}

// Whether the page is still the one that was found, after all of it was read.
bool MappedPool::is_there(const Candidate& page) const {
  return load_word_after_bytes(word_at(page.granule)) == page.record.generation;
}

void MappedPool::prefetch(const Key* keys, size_t n) const {
  for (size_t i = 0; i < n; ++i) __builtin_prefetch(head_of(keys[i]));
  for (size_t i = 0; i < n; ++i) {
    const uint32_t link = load_link(head_of(keys[i]));
    if (link == 0 || link > about_.n_granules) continue;
    __builtin_prefetch(word_at(link - 1));
    __builtin_prefetch(&page_records()[link - 1]);
    __builtin_prefetch(&next_[link - 1]);
  }
}

bool MappedPool::find(const Key& key, Find what, Candidate* found) const {
  const PageRecord* const records = page_records();
  uint32_t link = load_link(head_of(key));
  for (int step = 0; link != 0 && link <= about_.n_granules && step < kMostSteps; ++step) {
    const uint32_t granule = link - 1;
    // First the word: the record of a page that is not there yet may be another's by the time that it is.
    const uint64_t word = load_word(word_at(granule));
    PageRecord& record = found->record;
    copy_words(&records[granule], &record);
    found->granule = granule;
    if (is_committed(word) && record.generation == word && record.key == key && is_there(*found)) {
      const bool is_wanted = what == Find::kGuestsToo || !record.is_guest();
      return is_wanted && record.n_granules <= about_.n_granules - granule &&
             record.stored_nbytes() <= uint64_t{record.n_granules} * about_.granule;
    }
    link = load_link(&next_[granule]);
  }
  return false;
}

size_t MappedPool::fetch(const PageBatch& batch, bool check_sums, FetchStatus* statuses,
                         const Deadline& deadline, Find what) const {
  std::vector<std::pair<size_t, Candidate>> pages;
  uint64_t nbytes = 0;
  prefetch(batch.keys, batch.n_pages);
  for (size_t i = 0; i < batch.n_pages; ++i) {
    statuses[i] = FetchStatus::kMiss;
    Candidate page;
    if (!find(batch.keys[i], what, &page) || page.record.length != batch.length_of(i)) continue;
    pages.emplace_back(i, page);
    nbytes += page.record.length;
  }
  if (pages.empty()) return 0;
  const auto copy_page = [&](size_t k) {
    const auto& [i, page] = pages[k];
    if (copy_out(batch, i, page, check_sums)) statuses[i] = FetchStatus::kHit;
  };
  const size_t n_copied =
      make_copies({pages.size(), nbytes, std::ref(copy_page)}, [&] { return deadline.passed(); });
  for (size_t k = n_copied; k < pages.size(); ++k) statuses[pages[k].first] = FetchStatus::kTimedOut;
  return static_cast<size_t>(std::count_if(pages.begin(), pages.end(), [&](const auto& page) {
    return page.second.record.is_guest() && statuses[page.first] == FetchStatus::kHit;
  }));
}

bool MappedPool::copy_out(const PageBatch& batch, size_t i, const Candidate& page, bool check_sums) const {
  const uint8_t* from = region_->base() + about_.data_offset + uint64_t{page.granule} * about_.granule;
  const codec::Bytes bytes{batch.pieces + i * batch.n_pieces, batch.n_pieces};
  bool is_whole = true;
  if (page.record.packed != 0) {
    is_whole = codec::unpack_shared(from, page.record.stored_nbytes(), bytes);
  } else {
    for (size_t k = 0; k < batch.n_pieces; ++k) {
      const Piece& piece = bytes.pieces[k];
      copy_bytes(reinterpret_cast<void*>(piece.address), from, static_cast<size_t>(piece.nbytes));
      from += piece.nbytes;
    }
  }
  if (!is_there(page) || !is_whole) return false;
  if (!check_sums) return true;
  Checksum sum;
  for (size_t k = 0; k < batch.n_pieces; ++k) {
    const Piece& piece = bytes.pieces[k];
    sum.update(reinterpret_cast<const void*>(piece.address), static_cast<size_t>(piece.nbytes));
  }
  return sum.finish() == page.record.checksum;
}

// The location is what the page's owner would say, without its disk: whoever looks here does not ask there.
Location MappedPool::location_of(const Candidate& page) const {
  const PageRecord& record = page.record;
  return {about_.owner,
          boot(),
          about_.data_offset + uint64_t{page.granule} * about_.granule,
          record.length,
          uint64_t{page.granule} * sizeof(uint64_t),
          record.generation | (record.packed != 0 ? 1 : 0),
          record.checksum,
          about_.region,
          kResident | record.packed << kPackedShift};
}

void MappedPool::lookup(const Key* keys, size_t n, uint8_t* found, Location* locations, Find what) const {
  prefetch(keys, n);
  for (size_t i = 0; i < n; ++i) {
    Candidate page;
    found[i] = find(keys[i], what, &page) ? 1 : 0;
    locations[i] = found[i] != 0 ? location_of(page) : Location{};
  }
}

void CurrentMappedPool::lookup(const Key* keys, size_t n, uint8_t* found, Location* locations) const {
  if (const auto pool = get()) return pool->lookup(keys, n, found, locations, findable(*pool));
  std::fill_n(found, n, uint8_t{0});
  std::fill_n(locations, n, Location{});
}

void CurrentMappedPool::lookup_own(const Key* keys, size_t n, uint8_t* found, Location* locations) const {
  if (const auto pool = get()) return pool->lookup(keys, n, found, locations);
  std::fill_n(found, n, uint8_t{0});
  std::fill_n(locations, n, Location{});
}

}  // namespace p2pkv
