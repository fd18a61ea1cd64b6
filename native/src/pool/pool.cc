#include "pool/pool.h"

#include <unistd.h>

#include <random>

#include "base/checksum.h"
#include "base/copy.h"
#include "base/copy_team.h"
#include "page/words.h"

namespace p2pkv {
namespace {

constexpr uint64_t kDataAlignment = 4096;
// Pages of a batch before others are let in: 50 us of cache misses.
constexpr size_t kPagesPerTurn = 128;
// What a record has bits for.
constexpr uint64_t kLongestPage = (uint64_t{1} << 40) - 1;

// Odd, and of 62 bits: a location of an earlier boot is not taken for one of this, and no word ever wraps.
uint64_t random_start() {
  std::random_device random;
  const uint64_t bits = uint64_t{random()} << 32 | random();
  return (bits >> 2) | 1;
}

}  // namespace

bool Pool::plan(PoolOptions options, Plan* plan, std::string* error) {
  if (options.granule == 0 || options.granule % 64 != 0) {
    *error = "granule must be a positive multiple of 64, not " + std::to_string(options.granule);
    return false;
  }
  uint64_t n_granules = options.nbytes / options.granule;
  if (n_granules == 0 || options.nbytes % options.granule != 0) {
    *error = "nbytes must be a positive multiple of the granule of " + std::to_string(options.granule) +
             ", not " + std::to_string(options.nbytes);
    return false;
  }
  if (n_granules >= ExactBlocks::kMostGranules) {
    *error =
        "a pool has fewer than 2^31 granules, not " + std::to_string(n_granules) + "; use a larger granule";
    return false;
  }
  // Allocating more than there is would not fail: it would wake the kernel's killer of processes.
  const uint64_t memory =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (options.nbytes > memory) {
    *error = "a pool of " + std::to_string(options.nbytes) + " bytes does not fit this machine's memory of " +
             std::to_string(memory);
    return false;
  }
  if (options.memory.is_kept && options.memory.huge_page != 0) {
    *error = "memory of huge pages that were set aside is not kept";
    return false;
  }
  if (const uint64_t huge = options.memory.huge_page; huge != 0) {
    // Whole huge pages hold words and data together: one of 1 GiB for the words alone would be a waste.
    const uint64_t room = (options.nbytes + huge - 1) / huge * huge - kDataAlignment;
    n_granules = room / (options.granule + sizeof(uint64_t));
    options.nbytes = n_granules * options.granule;
  }
  const uint64_t words = n_granules * sizeof(uint64_t);
  *plan = {options, n_granules, (words + kDataAlignment - 1) / kDataAlignment * kDataAlignment};
  return true;
}

std::shared_ptr<Pool> Pool::create(PoolOptions options, std::string* error) {
  Plan made;
  if (!plan(std::move(options), &made, error)) return nullptr;
  auto region = SharedRegion::create(made.region_nbytes(), error, made.options.memory);
  if (!region) return nullptr;
  std::unique_ptr<KeptRecords> kept;
  if (const bool is_kept = made.options.memory.is_kept; is_kept || made.options.is_shown) {
    kept = KeptRecords::create(made.layout(region->fd()), is_kept, error);
    if (!kept) return nullptr;
  }
  std::unique_ptr<PageIndex> index;
  if (!made.make_index(&index, error)) return nullptr;
  const uint64_t first_word = random_start();
  std::fill_n(reinterpret_cast<uint64_t*>(region->base()), made.n_granules, first_word);
  store_fence();
  return std::shared_ptr<Pool>(
      new Pool(made, {std::move(region), std::move(kept), std::move(index)}, first_word));
}

bool Pool::Plan::make_index(std::unique_ptr<PageIndex>* index, std::string* error) const {
  if (!options.is_shown) return true;
  *index = PageIndex::create({options.owner, options.boot, region_nbytes(), data_offset, options.granule,
                              static_cast<uint32_t>(n_granules), 0, options.region,
                              options.memory.is_kept ? uint64_t{1} : uint64_t{0}},
                             error);
  return *index != nullptr;
}

Pool::Pool(const Plan& plan, Memory memory, uint64_t first_word)
    : options_(plan.options),
      data_offset_(plan.data_offset),
      kept_(std::move(memory.kept)),
      region_(std::move(memory.region)),
      index_(std::move(memory.index)),
      log_(options_.evictions_kept),
      packing_(options_.packing),
      pages_(static_cast<uint32_t>(plan.n_granules)),
      blocks_(pages_, region_->base(), static_cast<uint32_t>(plan.n_granules), first_word,
              [this](uint32_t granule) { evicted(granule); }) {
  blocks_.keep(kept_.get());
}

uint8_t* Pool::data_at(uint32_t granule) const {
  return region_->base() + data_offset_ + uint64_t{granule} * options_.granule;
}

Location Pool::location_of(uint32_t granule) const {
  const Page& page = pages_[granule];
  const uint32_t flags = options_.has_disk && page.is_guest == 0 ? kResident | kHasDisk : kResident;
  return {options_.owner,
          boot_,
          data_offset_ + uint64_t{granule} * options_.granule,
          page.length,
          uint64_t{granule} * sizeof(uint64_t),
          page.generation | (page.packed != 0 ? 1 : 0),
          page.checksum,
          options_.region,
          flags | static_cast<uint32_t>(page.packed) << kPackedShift};
}

// --- publish

uint64_t Pool::publish(const PageBatch& batch, PoolStatus* statuses, Location* locations,
                       const Deadline& deadline, Consent* consent, const PoolShare& share, PageGiver* giver) {
  std::vector<Draft> drafts(batch.n_pages);
  for (size_t i = 0; i < batch.n_pages; ++i) drafts[i].length = batch.length_of(i);
  std::vector<codec::Block> tables;  // the drafts' sizes point into it
  if (options_.packing != Packing::kOff) tables = measure(batch, &drafts, deadline);
  uint64_t n_hidden;
  {
    const Lock lock(mutex_);
    expire_pins();
    if (!touch_existing(batch, drafts, statuses, locations)) return n_hidden_;
    if (share.account != 0) hold_existing(batch, &drafts);
    Room room{deadline, share};
    for (size_t i = 0; i < batch.n_pages; ++i) {
      if (i % kPagesPerTurn == kPagesPerTurn - 1) let_in(&room);
      statuses[i] = reserve(batch.keys[i], &drafts[i], &room);
      // Now, because the page may be retracted during the copies.
      const bool is_there = statuses[i] == PoolStatus::kExists || statuses[i] == PoolStatus::kOtherLength;
      locations[i] = is_there ? location_of(drafts[i].granule) : Location{};
    }
    n_hidden = n_hidden_ - room.n_hidden_by_others;
  }
  log_.announce();
  uint64_t nbytes = 0;
  for (size_t i = 0; i < batch.n_pages; ++i) {
    if (statuses[i] == PoolStatus::kStored) nbytes += drafts[i].length;
  }
  const auto copy_page = [&](size_t i) {
    if (statuses[i] == PoolStatus::kStored && !copy_in(batch, i, &drafts[i]))
      statuses[i] = PoolStatus::kChanged;
  };
  const auto is_over = [&] { return deadline.passed() || (consent != nullptr && consent->is_withdrawn()); };
  if (giver != nullptr) have_given(batch, *giver, &drafts, statuses, deadline);
  const size_t n_copied =
      giver != nullptr ? batch.n_pages : make_copies({batch.n_pages, nbytes, std::ref(copy_page)}, is_over);
  const size_t n_kept = consent == nullptr || consent->begin_commit() ? n_copied : 0;
  for (size_t i = n_kept; i < batch.n_pages; ++i) {
    if (statuses[i] != PoolStatus::kStored) continue;
    statuses[i] = PoolStatus::kTimedOut;
    note_refused(batch.keys[i], statuses[i]);
  }
  const Lock lock(mutex_);
  // From the back, so that the front of the batch counts as used last.
  for (size_t i = batch.n_pages; i-- > 0;) {
    if (i % kPagesPerTurn == kPagesPerTurn - 1) mutex_.let_in();
    const uint32_t granule = drafts[i].granule;
    const bool is_there = statuses[i] == PoolStatus::kExists || statuses[i] == PoolStatus::kOtherLength;
    if (statuses[i] == PoolStatus::kStored) {
      statuses[i] = commit(batch.keys[i], drafts[i], &locations[i]);
    } else if (granule != PageBlocks::kNone && !is_there) {
      blocks_.drop(granule);
    } else if (granule != PageBlocks::kNone) {
      if (pages_[granule].state == PageState::kCommitted) blocks_.touch(granule);
      --pages_[granule].n_copies;
      release_if_unheld(granule);
    }
  }
  return n_hidden;
}

// Before the batch makes room for its new pages, so that it does not evict what it is about to find. From the
// back: if it must after all, the front stays. False, with all the answers, if a page is there with another
// length: then nothing of the batch may be stored.
bool Pool::touch_existing(const PageBatch& batch, const std::vector<Draft>& drafts, PoolStatus* statuses,
                          Location* locations) {
  bool lengths_agree = true;
  for (size_t i = 0; i < batch.n_pages; ++i) pages_.prefetch(batch.keys[i]);
  for (size_t i = batch.n_pages; i-- > 0;) {
    const uint32_t existing = pages_.find(batch.keys[i]);
    statuses[i] = PoolStatus::kNotTried;
    locations[i] = Location{};
    if (existing == PageTable::kNone) continue;
    blocks_.touch(existing);
    const bool is_same = pages_[existing].length == drafts[i].length;
    statuses[i] = is_same ? PoolStatus::kExists : PoolStatus::kOtherLength;
    locations[i] = location_of(existing);
    lengths_agree = lengths_agree && is_same;
  }
  return lengths_agree;
}

// kStored means that the draft has a block now. What is there already is held until the batch's commit: the
// batch's own reservations must not evict its front.
PoolStatus Pool::reserve(const Key& key, Draft* draft, Room* room) {
  if (still_holds(draft)) return PoolStatus::kExists;
  const uint32_t existing = pages_.find(key);
  if (existing != PageTable::kNone) {
    draft->granule = existing;
    ++pages_[existing].n_copies;
    return pages_[existing].length == draft->length ? PoolStatus::kExists : PoolStatus::kOtherLength;
  }
  const uint64_t n_granules = granules_of(*draft);
  if (n_granules > blocks_.n_granules() || draft->length > kLongestPage) return PoolStatus::kTooLarge;
  if (is_released_) room->refusal = PoolStatus::kNoRoom;
  if (n_granules * options_.granule > room->share.nbytes) {  // which says nothing of the pages behind it
    room->is_share_full = true;
    count_no_room(*room);
    note_refused(key, PoolStatus::kNoRoom);
    return PoolStatus::kNoRoom;
  }
  if (room->refusal == PoolStatus::kStored) draft->granule = allocate(n_granules, room);
  if (room->refusal == PoolStatus::kNoRoom) count_no_room(*room);
  note_refused(key, room->refusal);
  return room->refusal;
}

bool Pool::copy_in(const PageBatch& batch, size_t i, Draft* draft) {
  if (draft->packed.nbytes != 0) return pack_in(batch, i, draft);
  uint8_t* to = data_at(draft->granule);
  Checksum sum;
  for (size_t k = 0; k < batch.n_pieces; ++k) {
    const Piece& piece = batch.pieces[i * batch.n_pieces + k];
    copy_and_checksum(to, reinterpret_cast<const void*>(piece.address), static_cast<size_t>(piece.nbytes),
                      sum);
    to += piece.nbytes;
  }
  draft->checksum = sum.finish();
  return true;
}

PoolStatus Pool::commit(const Key& key, const Draft& draft, Location* location) {
  if (is_released_) {
    blocks_.drop(draft.granule);
    return PoolStatus::kNoRoom;
  }
  const uint32_t existing = pages_.find(key);
  if (existing != PageTable::kNone) {  // another thread was faster
    blocks_.drop(draft.granule);
    blocks_.touch(existing);
    *location = location_of(existing);
    return pages_[existing].length == draft.length ? PoolStatus::kExists : PoolStatus::kOtherLength;
  }
  Page& page = pages_[draft.granule];
  page.key = key;
  page.length = draft.length;
  page.packed = draft.packed.nbytes / kPackedUnit;
  page.checksum = draft.checksum;
  page.is_guest = draft.is_guest ? 1 : 0;
  blocks_.commit(draft.granule);
  enter(draft.granule);
  note(draft.granule, PageEvent::kStored);
  ++n_stored_;
  *location = location_of(draft.granule);
  return PoolStatus::kStored;
}

// --- fetch, lookup

void Pool::lookup(const Key* keys, size_t n, uint8_t* found, Location* locations) {
  const Lock lock(mutex_);
  for (size_t i = 0; i < n; ++i) pages_.prefetch(keys[i]);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t granule = pages_.find(keys[i]);
    found[i] = granule != PageTable::kNone;
    locations[i] = found[i] ? location_of(granule) : Location{};
  }
}

// --- retract, purge, list

void Pool::retract(const Key* keys, size_t n, uint8_t* found, Location* locations) {
  const Lock lock(mutex_);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t granule = pages_.find(keys[i]);
    found[i] = granule != PageTable::kNone;
    locations[i] = found[i] ? location_of(granule) : Location{};
    if (!found[i]) continue;
    take_out(granule, PageEvent::kRetracted);
  }
}

size_t Pool::retract_exactly(const Key* keys, const uint64_t* generations, size_t n, PageEvent why) {
  size_t n_retracted = 0;
  {
    const Lock lock(mutex_);
    for (size_t i = 0; i < n; ++i) {
      if (i % kPagesPerTurn == kPagesPerTurn - 1) mutex_.let_in();
      const uint32_t granule = pages_.find(keys[i]);
      if (granule == PageTable::kNone || pages_[granule].generation != generations[i]) continue;
      log_.push(keys[i], location_of(granule));
      take_out(granule, why);
      ++n_retracted;
    }
  }
  if (n_retracted > 0) log_.announce();
  return n_retracted;
}

// By place and not by age: what is there throughout is met exactly once, whatever is used or published
// between the turns.
uint64_t Pool::purge(PageEvent why) {
  uint64_t n_purged = 0;
  {
    const Lock lock(mutex_);
    expire_pins();
    for (uint32_t at = 0; at < blocks_.n_granules(); mutex_.let_in()) {
      for (size_t i = 0; i < kPagesPerTurn; ++i) {
        const uint32_t granule = blocks_.next_page(&at, 1);
        if (granule == PageBlocks::kNone) continue;
        log_.push(pages_[granule].key, location_of(granule));
        take_out(granule, why);
        ++n_purged;
      }
    }
    n_evicted_ += n_purged;
  }
  log_.announce();
  return n_purged;
}

uint64_t Pool::list(uint64_t cursor, size_t max, std::vector<Eviction>* pages) {
  const Lock lock(mutex_);
  if (cursor >= blocks_.n_granules()) return 0;
  auto at = static_cast<uint32_t>(cursor);
  for (size_t n_listed = 0;; ++n_listed) {
    const uint32_t granule = blocks_.next_page(&at, UINT32_MAX);
    if (granule == PageBlocks::kNone) return 0;
    if (n_listed == max) return granule;
    pages->push_back({pages_[granule].key, location_of(granule)});
  }
}

uint64_t Pool::list_uses(uint64_t cursor, size_t max, std::vector<PageUse>* pages) {
  const Lock lock(mutex_);
  if (cursor >= blocks_.n_granules()) return 0;
  auto at = static_cast<uint32_t>(cursor);
  for (size_t n_listed = 0;; ++n_listed) {
    const uint32_t granule = blocks_.next_page(&at, UINT32_MAX);
    if (granule == PageBlocks::kNone) return 0;
    if (n_listed == max) return granule;
    const Page& page = pages_[granule];
    if (page.is_guest == 0) pages->push_back({page.key, page.stamp, page.length});
  }
}

void Pool::make_own(const Key* keys, const uint64_t* generations, size_t n) {
  const Lock lock(mutex_);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t granule = pages_.find(keys[i]);
    if (granule == PageTable::kNone || pages_[granule].generation != generations[i]) continue;
    pages_[granule].is_guest = 0;
    blocks_.keep_use(granule);
  }
}

bool Pool::release_memory() {
  const Lock lock(mutex_);
  is_released_ = true;
  pins_.expire(INT64_MAX, [this](uint32_t granule) { unpin_page(granule); });
  uint32_t at = 0;
  for (uint32_t granule; (granule = blocks_.next_page(&at, UINT32_MAX)) != PageBlocks::kNone;)
    take_out(granule, PageEvent::kCleared);
  if (blocks_.n_used() > 0) return false;
  unmap();
  return true;
}

void Pool::unmap() {
  blocks_.keep(nullptr);
  region_->release();
  if (kept_) kept_->release();  // after that another process may write
}

uint64_t Pool::n_hidden() {
  const Lock lock(mutex_);
  return n_hidden_;
}

PoolStats Pool::stats() {
  const Lock lock(mutex_);
  expire_pins();
  const uint64_t used = uint64_t{blocks_.n_used()} * options_.granule;
  return {options_.nbytes,  used,        pages_.size(), pinned_bytes_,   n_stored_, n_evicted_, n_no_room_,
          log_.n_dropped(), log_.size(), n_guest_hits_, packing_.pages()};
}

}  // namespace p2pkv
