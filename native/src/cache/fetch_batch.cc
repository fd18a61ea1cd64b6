#include "cache/fetch_batch.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/checksum.h"
#include "base/copy_team.h"
#include "codec/packed.h"
#include "page/packed_location.h"

namespace p2pkv {
namespace {

FetchBatch::Miss miss_of(Status status) {
  switch (status) {
    case Status::kPeerLost:
    case Status::kCanceled:
    case Status::kPending:
      return FetchBatch::kPeerLost;
    case Status::kTimedOut:
      return FetchBatch::kTimedOut;
    default:
      return FetchBatch::kRejected;
  }
}

}  // namespace

FetchBatch::FetchBatch(std::vector<Key> keys, std::vector<Piece> pieces, std::vector<int32_t> memory_of,
                       size_t n_pieces)
    : keys_(std::move(keys)),
      pieces_(std::move(pieces)),
      memory_of_(std::move(memory_of)),
      n_pieces_(n_pieces),
      lengths_(keys_.size()),
      locations_(keys_.size()),
      states_(keys_.size(), State::kUnlocated),
      hits_(keys_.size()),
      miss_kinds_(keys_.size(), kNotFound),
      of_pieces_(pieces_.size(), Status::kPeerLost),
      unpacked_(keys_.size(), Unpacked::kNotYet) {
  for (size_t i = 0; i < pieces_.size(); ++i)
    lengths_[i / n_pieces_] += static_cast<uint64_t>(pieces_[i].nbytes);
  for (const uint64_t length : lengths_) nbytes_ += length;
}

bool FetchBatch::take_own(Pool* pool, const Deadline& deadline, Taken* taken) {
  std::vector<FetchStatus> statuses(n_pages());
  pool->fetch(as_page_batch(), statuses.data(), deadline, taker());
  bool lengths_agree = true;
  for (size_t page = 0; page < n_pages(); ++page) {
    if (statuses[page] == FetchStatus::kOtherLength) lengths_agree = false;
    if (statuses[page] == FetchStatus::kTimedOut) fail(page, Status::kTimedOut);
    if (statuses[page] == FetchStatus::kUnreadable) miss(page, kUnreadable);
    if (statuses[page] == FetchStatus::kHit) took(page, taken);
  }
  return lengths_agree;
}

void FetchBatch::took(size_t page, Taken* taken) {
  hits_[page] = 1;
  states_[page] = State::kSettled;
  ++taken->n_pages;
  taken->nbytes += lengths_[page];
}

// An engine has no pool of its own, so that all pages are still to be found: the batch goes there as it is.
size_t FetchBatch::take_mapped(const MappedPool& pool, MappedPool::Find what, bool check_sums,
                               const Deadline& deadline, Taken* taken, std::vector<size_t>* pages) {
  std::vector<FetchStatus> statuses(n_pages());
  const size_t n_guests = pool.fetch(as_page_batch(), check_sums, statuses.data(), deadline, what);
  for (size_t page = 0; page < n_pages(); ++page) {
    if (statuses[page] == FetchStatus::kTimedOut) fail(page, Status::kTimedOut);
    if (statuses[page] != FetchStatus::kHit) continue;
    took(page, taken);
    pages->push_back(page);
  }
  return n_guests;
}

void FetchBatch::take_from_disk(Tier* tier, const Deadline& deadline, Taken* taken) {
  std::vector<int64_t> pages = unlocated();
  std::vector<Key> keys;
  for (const int64_t page : pages) keys.push_back(key(page));
  std::vector<uint8_t> found(pages.size());
  tier->contains(keys.data(), keys.size(), found.data());
  keys.clear();
  std::erase_if(pages, [&, i = size_t{0}](int64_t) mutable { return found[i++] == 0; });
  if (pages.empty()) return;
  std::vector<Piece> pieces;
  for (const int64_t page : pages) {
    keys.push_back(key(page));
    const auto first = pieces_.begin() + page * static_cast<int64_t>(n_pieces_);
    pieces.insert(pieces.end(), first, first + static_cast<int64_t>(n_pieces_));
  }
  std::vector<disk::ReadStatus> statuses(pages.size());
  tier->read({pages.size(), n_pieces_, keys.data(), pieces.data()}, deadline, statuses.data());
  for (size_t i = 0; i < pages.size(); ++i) {
    if (statuses[i] == disk::ReadStatus::kHit) took(static_cast<size_t>(pages[i]), taken);
  }
}

size_t FetchBatch::locate_cached(LocationCache* cache, Shard* shard) {
  const std::vector<int64_t> pages = unlocated();
  if (pages.empty()) return 0;
  std::vector<Key> keys;
  keys.reserve(pages.size());
  for (const int64_t page : pages) keys.push_back(key(page));
  std::vector<uint8_t> found(pages.size());
  std::vector<Location> locations(pages.size());
  cache->get(keys.data(), keys.size(), found.data(), locations.data());
  shard->keep_present(locations.data(), found.data(), pages.size());
  size_t n_located = 0;
  for (size_t i = 0; i < pages.size(); ++i) {
    if (found[i] == 0) continue;
    const auto page = static_cast<size_t>(pages[i]);
    locations_[page] = locations[i];
    states_[page] = State::kLocated;
    ++n_located;
  }
  return n_located;
}

std::vector<int64_t> FetchBatch::unlocated() const {
  std::vector<int64_t> pages;
  const auto first = std::find(states_.begin(), states_.end(), State::kUnlocated);
  if (first == states_.end()) return pages;
  pages.reserve(static_cast<size_t>(states_.end() - first));
  for (auto page = static_cast<size_t>(first - states_.begin()); page < n_pages(); ++page) {
    if (states_[page] == State::kUnlocated) pages.push_back(static_cast<int64_t>(page));
  }
  return pages;
}

void FetchBatch::locate(const int64_t* pages, const uint8_t* found, const Location* locations, size_t n,
                        Shard* shard, LocationCache* cache) {
  std::vector<uint8_t> present(found, found + n);
  std::vector<Location> there(locations, locations + n);
  shard->keep_present(there.data(), present.data(), n);
  is_looked_up_.resize(n_pages());
  std::vector<Key> keys;
  std::vector<Location> fresh;
  for (size_t i = 0; i < n; ++i) {
    if (present[i] == 0) continue;
    const auto page = static_cast<size_t>(pages[i]);
    locations_[page] = there[i];
    states_[page] = State::kLocated;
    is_looked_up_[page] = 1;
    keys.push_back(keys_[page]);
    fresh.push_back(there[i]);
  }
  cache->put(keys.data(), fresh.data(), keys.size());
}

std::vector<int64_t> FetchBatch::cold(uint64_t own_key) const {
  std::vector<int64_t> pages;
  for (size_t page = 0; page < n_pages(); ++page) {
    const Location& location = locations_[page];
    if (states_[page] != State::kLocated || location.owner == own_key) continue;
    if ((location.flags & kResident) == 0) pages.push_back(static_cast<int64_t>(page));
  }
  return pages;
}

int64_t FetchBatch::find_other_length(uint64_t* length, uint64_t* expected) const {
  for (size_t page = 0; page < n_pages(); ++page) {
    if (states_[page] != State::kLocated || locations_[page].length == lengths_[page]) continue;
    *length = locations_[page].length;
    *expected = lengths_[page];
    return static_cast<int64_t>(page);
  }
  return -1;
}

const std::vector<FetchBatch::Owner>& FetchBatch::group_by_owner(uint64_t own_key) {
  owners_.clear();
  for (size_t page = 0; page < n_pages(); ++page) {
    if (states_[page] != State::kLocated) continue;
    const Location& location = locations_[page];
    if ((location.flags & kResident) == 0) {
      states_[page] = State::kSettled;
      miss_kinds_[page] = kNotPromoted;
      continue;
    }
    // It can't be taken as it is, and by the length of the memory that it is for, which may be another.
    if (taker_ && (packed_nbytes(location) != 0 || location.length != lengths_[page])) continue;
    if (location.owner == own_key || !can_prove(location)) {
      fail(page, Status::kRejected);
      continue;
    }
    auto owner = std::find_if(owners_.begin(), owners_.end(), [&](const Owner& other) {
      return other.key == location.owner && other.boot == location.boot;
    });
    if (owner == owners_.end()) {
      owner = owners_.insert(owner, Owner{location.owner, location.boot, {}, {}});
      if (owners_.size() == 1) owner->pages.reserve(n_pages() - page);  // mostly there is no other one
    }
    group(page, &*owner);
  }
  return owners_;
}

// Has a page read with others of its owner.
void FetchBatch::group(size_t page, Owner* owner) {
  owner->pages.push_back(page);
  owner->nbytes += lengths_[page];
  unpacked_[page] = Unpacked::kNotYet;
  uint64_t before = 0;
  for (size_t i = page * n_pieces_; i < (page + 1) * n_pieces_; ++i) {
    const bool is_read = read_part(page, i, before).nbytes > 0;
    before += static_cast<uint64_t>(pieces_[i].nbytes);
    // until a read says otherwise; what needs none is as good as the rest
    of_pieces_[i] = is_read ? Status::kPeerLost : Status::kOk;
    if (!is_read) continue;
    if (std::find(owner->legs.begin(), owner->legs.end(), memory_of_[i]) == owner->legs.end()) {
      owner->legs.push_back(memory_of_[i]);
    }
  }
}

FetchBatch::Taken FetchBatch::settle(const Owner& owner, bool check_sums, const Deadline& deadline) {
  Taken taken;
  unpack(owner, deadline);
  for (const size_t page : owner.pages) {
    if (states_[page] == State::kSettled) continue;  // it could not be unpacked
    if (const Status worst = worst_of(page); worst != Status::kOk) {
      fail(page, worst);
      if (miss_kinds_[page] == kRejected) ++n_failed_checks_[kRejected];
      continue;
    }
    states_[page] = State::kSettled;
    if (taker_ && !taker_->has(page)) {
      miss(page, kNotFound);
      continue;
    }
    if (check_sums && !has_right_checksum(page)) {
      miss(page, kChecksum);
      ++n_failed_checks_[kChecksum];
      continue;
    }
    hits_[page] = 1;
    ++taken.n_pages;
    taken.nbytes += lengths_[page];
  }
  return taken;
}

// Unpacks what came packed and is proven: its words were loaded, so that nobody else writes to these bytes
// any more. What can't be unpacked, or not in time, is missed; so is what was proven and could not be
// unpacked where it lay.
void FetchBatch::unpack(const Owner& owner, const Deadline& deadline) {
  std::vector<size_t> pages;
  uint64_t nbytes = 0;
  for (const size_t page : owner.pages) {
    if (packed_nbytes(locations_[page]) == 0 || worst_of(page) != Status::kOk) continue;
    if (unpacked_[page] == Unpacked::kFailed) miss(page, kUnreadable);
    if (unpacked_[page] != Unpacked::kNotYet) continue;
    pages.push_back(page);
    nbytes += lengths_[page];
  }
  if (pages.empty()) return;
  const auto unpack_page = [&](size_t k) {
    const size_t page = pages[k];
    const codec::Bytes bytes{&pieces_[page * n_pieces_], n_pieces_};
    if (!codec::unpack_in_place(bytes, packed_nbytes(locations_[page]))) miss(page, kUnreadable);
  };
  size_t n_unpacked = 0;
  if (!deadline.passed()) {
    n_unpacked =
        make_copies({pages.size(), nbytes, std::ref(unpack_page)}, [&] { return deadline.passed(); });
  }
  for (size_t k = n_unpacked; k < pages.size(); ++k) fail(pages[k], Status::kTimedOut);
}

// The statuses are ordered by how bad they are: a page is as good as its worst piece.
Status FetchBatch::worst_of(size_t page) const {
  const auto first = of_pieces_.begin() + static_cast<ptrdiff_t>(page * n_pieces_);
  return *std::max_element(first, first + static_cast<ptrdiff_t>(n_pieces_));
}

void FetchBatch::fail(size_t page, Status status) {
  miss(page, miss_of(status));
}

void FetchBatch::miss(size_t page, Miss why) {
  states_[page] = State::kSettled;
  miss_kinds_[page] = static_cast<uint8_t>(why);
}

bool FetchBatch::has_right_checksum(size_t page) const {
  Checksum sum;
  for (size_t i = page * n_pieces_; i < (page + 1) * n_pieces_; ++i) {
    sum.update(reinterpret_cast<const void*>(pieces_[i].address), static_cast<size_t>(pieces_[i].nbytes));
  }
  return sum.finish() == locations_[page].checksum;
}

void FetchBatch::note_reads(Touches* touches) const {
  for (const Owner& owner : owners_) note_reads_from(owner, touches);
  for (const Owner& owner : rerouted_) note_reads_from(owner, touches);
}

void FetchBatch::note_reads_from(const Owner& owner, Touches* touches) const {
  // What was missed here may have been found elsewhere.
  const auto is_from_here = [&](size_t page) {
    return hits_[page] != 0 && locations_[page].owner == owner.key;
  };
  const PeerId peer{owner.key, owner.boot};
  if (std::all_of(owner.pages.begin(), owner.pages.end(), is_from_here)) {
    return touches->note(peer, keys_, owner.pages);
  }
  std::vector<size_t> pages;
  std::copy_if(owner.pages.begin(), owner.pages.end(), std::back_inserter(pages), is_from_here);
  touches->note(peer, keys_, pages);
}

size_t FetchBatch::forget_stale(uint64_t own_key, LocationCache* cache, std::vector<Key>* keys,
                                std::vector<Location>* locations) {
  std::vector<Key> forgotten;
  keys->insert(keys->end(), stale_keys_.begin(), stale_keys_.end());
  locations->insert(locations->end(), stale_.begin(), stale_.end());
  stale_keys_.clear();
  stale_.clear();
  for (size_t page = 0; page < n_pages(); ++page) {
    if (hits_[page] != 0 || states_[page] != State::kSettled) continue;
    // maybe its owner has it no more: the next fetch asks the directory, which may know somebody else
    if (miss_kinds_[page] == kNotPromoted) cache->drop(&keys_[page], 1);
    if (miss_kinds_[page] != kRejected && miss_kinds_[page] != kPeerLost) continue;
    states_[page] = State::kUnlocated;
    forgotten.push_back(keys_[page]);
    if (miss_kinds_[page] != kRejected) continue;
    Location& location = locations_[page];
    if ((location.flags & kHasDisk) != 0 && location.owner != own_key) {
      location.flags &= ~kResident;
      states_[page] = State::kLocated;
      continue;
    }
    keys->push_back(keys_[page]);
    locations->push_back(locations_[page]);
  }
  cache->drop(forgotten.data(), forgotten.size());
  return forgotten.size();
}

std::array<uint64_t, FetchBatch::kMissKinds> FetchBatch::misses() const {
  std::array<uint64_t, kMissKinds> counts{};
  for (size_t page = 0; page < n_pages(); ++page) {
    if (hits_[page] == 0) ++counts[miss_kinds_[page]];
  }
  return counts;
}

}  // namespace p2pkv
