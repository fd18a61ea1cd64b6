#include "pool/kept_records.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/checksum.h"
#include "base/clock.h"
#include "page/words.h"

namespace p2pkv {
namespace {

constexpr uint64_t kMagic = 0x3144524345525032;  // "2PRECRD1"
constexpr uint32_t kVersion = 1;
// Words are of 62 bits at a start and grow: what is beyond this was never one.
constexpr uint64_t kGreatestWord = uint64_t{1} << 63;
constexpr uint64_t kGreatestStamp = uint64_t{1} << 48;

void store(uint64_t* at, uint64_t value) {
  std::atomic_ref<uint64_t>(*at).store(value, std::memory_order_release);
}

size_t size_of(int fd) {
  struct stat info{};
  return fstat(fd, &info) == 0 ? static_cast<size_t>(info.st_size) : 0;
}

// Gives back what lies behind `offset`, for all who map it.
bool punch(int fd, size_t offset, std::string* error) {
  const auto at = static_cast<off_t>(offset);
  const auto nbytes = static_cast<off_t>(size_of(fd)) - at;
  if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, nbytes) == 0) return true;
  *error = std::string("cannot give memory back: ") + std::strerror(errno);
  return false;
}

}  // namespace

// Two of them are there: the one that counts, and the one that is written next.
struct KeptRecords::Epochs {
  static constexpr size_t kMost = NamespaceEpochs::kMost + 1;

  uint64_t n;
  NamespaceEpoch epochs[kMost];
  uint64_t sum;

  uint64_t make_sum() const { return p2pkv::checksum(this, offsetof(Epochs, sum)); }
};

struct KeptRecords::Header {
  uint64_t magic;
  uint32_t version;
  uint32_t record_nbytes;
  Layout layout;
  uint64_t sum;             // of all before
  uint64_t current_epochs;  // which of them counts
  Epochs epochs[2];
  KeptBoots boots;  // zeros in memory of before it was written here

  uint64_t make_sum() const { return p2pkv::checksum(this, offsetof(Header, sum)); }
};

KeptRecords::KeptRecords(std::unique_ptr<SharedRegion> region, WriterLock lock)
    : lock_(std::move(lock)),
      region_(std::move(region)),
      header_(reinterpret_cast<Header*>(region_->base())),
      records_(reinterpret_cast<PageRecord*>(region_->base() + kRecordsOffset)) {
  static_assert(sizeof(Header) <= kRecordsOffset);
}

std::unique_ptr<KeptRecords> KeptRecords::create(const Layout& layout, bool is_kept, std::string* error) {
  RegionOptions options;
  options.is_kept = is_kept;
  options.is_lazy = true;
  auto region = SharedRegion::create(records_nbytes(layout.n_granules), error, options);
  if (!region) return nullptr;
  WriterLock lock = WriterLock::take(region->fd(), Deadline::after(1), error);
  if (!lock) return nullptr;
  auto records = std::unique_ptr<KeptRecords>(new KeptRecords(std::move(region), std::move(lock)));
  Header& header = *records->header_;
  header.magic = kMagic;
  header.version = kVersion;
  header.record_nbytes = sizeof(PageRecord);
  header.layout = layout;
  header.sum = header.make_sum();
  records->write_epochs({});
  return records;
}

std::unique_ptr<KeptRecords> KeptRecords::map_left(int fd, size_t nbytes, WriterLock lock,
                                                   std::string* error) {
  auto region = SharedRegion::adopt(fd, nbytes, error);
  if (!region) return nullptr;
  auto records = std::unique_ptr<KeptRecords>(new KeptRecords(std::move(region), std::move(lock)));
  const Header& header = *records->header_;
  if (header.magic != kMagic || header.version != kVersion || header.record_nbytes != sizeof(PageRecord)) {
    *error = "its records are of another version of p2pkv, " + std::to_string(header.version) + " and not " +
             std::to_string(kVersion);
    return nullptr;
  }
  if (header.sum != header.make_sum()) {
    *error = "the beginning of its records is damaged";
    return nullptr;
  }
  return records;
}

std::unique_ptr<KeptRecords> KeptRecords::adopt(int fd, WriterLock lock, const Layout& layout,
                                                std::string* error) {
  auto records = map_left(fd, records_nbytes(layout.n_granules), std::move(lock), error);
  if (records && records->header_->layout != layout) {
    *error = "it is of a pool with another size, granule or owner";
    return nullptr;
  }
  return records;
}

bool KeptRecords::give_back(int records, int pool, std::string* error) {
  WriterLock lock = WriterLock::take(records, Deadline::after(1), error);
  if (!lock) return false;
  const auto left = map_left(records, size_of(records), std::move(lock), error);
  if (!left) return false;
  const Layout& layout = left->header_->layout;
  const auto region = SharedRegion::adopt(pool, layout.region_nbytes, error);
  if (!region) return false;
  struct stat info{};
  if (fstat(pool, &info) != 0 || info.st_ino != layout.pool_inode ||
      left->region_->nbytes() != records_nbytes(layout.n_granules)) {
    *error = "its records are not of this pool";
    return false;
  }
  // First the words, the generation kept in them: who goes on with it after all, because this process is
  // killed here, finds a pool without pages. Whoever has copied bytes that went meanwhile sees the word.
  for (uint32_t granule = 0; granule < layout.n_granules; ++granule) {
    uint8_t* const word = region->base() + size_t{granule} * sizeof(uint64_t);
    store_word_ahead(word, load_word(word) | 1);
  }
  store_fence();
  return punch(pool, layout.data_offset, error) && punch(records, kRecordsOffset, error);
}

void KeptRecords::write(uint32_t granule, const Page& page, uint32_t n_granules, uint64_t stamp) {
  PageRecord& record = records_[granule];
  record.key = page.key;
  record.length = page.length;
  record.packed = static_cast<uint32_t>(page.packed);
  record.n_granules = n_granules;
  record.checksum = page.checksum;
  record.generation = page.generation;
  record.sum = record.make_sum(granule);
  use(granule, stamp, page.is_guest != 0);
}

void KeptRecords::use(uint32_t granule, uint64_t stamp, bool is_guest) {
  store(&records_[granule].use, stamp << 1 | (is_guest ? 1 : 0));
}

void KeptRecords::write_boots(const KeptBoots& boots) {
  store(&header_->boots.since, boots.since);
  store(&header_->boots.last, boots.last);
}

KeptBoots KeptRecords::boots() const {
  return header_->boots;
}

void KeptRecords::write_epochs(const std::vector<NamespaceEpoch>& epochs) {
  const uint64_t next = 1 - (header_->current_epochs & 1);
  Epochs& to = header_->epochs[next];
  to.n = std::min(epochs.size(), Epochs::kMost);
  std::copy_n(epochs.begin(), to.n, to.epochs);
  to.sum = to.make_sum();
  store(&header_->current_epochs, next);
}

bool KeptRecords::read_epochs(std::vector<NamespaceEpoch>* epochs) const {
  if (header_->current_epochs > 1) return false;
  const Epochs& from = header_->epochs[header_->current_epochs];
  if (from.n > Epochs::kMost || from.sum != from.make_sum()) return false;
  epochs->assign(from.epochs, from.epochs + from.n);
  return true;
}

bool KeptRecords::read_words(const uint8_t* words, uint64_t* greatest, uint32_t* n_pages,
                             std::string* error) const {
  *greatest = 0;
  *n_pages = 0;
  for (uint32_t granule = 0; granule < header_->layout.n_granules; ++granule) {
    const uint64_t word = load_word(words + size_t{granule} * sizeof(uint64_t));
    *greatest = std::max(*greatest, word);
    if (is_committed(word)) ++*n_pages;
  }
  if (*greatest >= kGreatestWord) *error = "one of its words was never one";
  return *greatest < kGreatestWord;
}

bool KeptRecords::read(const uint8_t* words, PageTable* table, std::vector<Left>* pages,
                       std::string* error) const {
  uint32_t end = 0;  // of the page before
  for (uint32_t granule = 0; granule < header_->layout.n_granules; ++granule) {
    const uint64_t word = load_word(words + size_t{granule} * sizeof(uint64_t));
    if (!is_committed(word)) continue;
    uint32_t n_granules = 0;
    if (granule < end || !read_page(granule, word, &(*table)[granule], &n_granules)) {
      *error = "the record of the page at granule " + std::to_string(granule) + " can't be right";
      return false;
    }
    end = granule + n_granules;
    pages->push_back({granule, n_granules});
  }
  return true;
}

bool KeptRecords::read_page(uint32_t granule, uint64_t word, Page* page, uint32_t* n_granules) const {
  const PageRecord& record = records_[granule];
  const Layout& layout = header_->layout;
  if (record.generation != word || record.sum != record.make_sum(granule)) return false;
  if (record.n_granules == 0 || record.n_granules > layout.n_granules - granule) return false;
  if (record.stored_nbytes() > uint64_t{record.n_granules} * layout.granule) return false;
  if (record.use >> 1 >= kGreatestStamp) return false;
  *n_granules = record.n_granules;
  *page = Page{};
  page->key = record.key;
  page->length = record.length;
  page->packed = record.packed;
  page->checksum = record.checksum;
  page->generation = record.generation;
  page->stamp = record.use >> 1;
  page->is_guest = record.is_guest() ? 1 : 0;
  return page->length == record.length && page->packed == record.packed;
}

void KeptRecords::release() {
  region_->release();
  lock_.release();
}

}  // namespace p2pkv
