#include "attach/engine_shares.h"

#include <algorithm>

namespace p2pkv::attaching {
namespace {

// Pages that the pool is asked of in one go: some 10 us of cache misses, in which it lets nobody in.
constexpr size_t kReviewed = 64;
// After so many that a publish found used, pages go whether or not they were: it must not take long where all
// are. A guess.
constexpr size_t kMostSpared = 512;
// So many of the remembered are looked at for each page that is stored, if more is remembered than the pool
// can have: two, so that fewer are remembered from then on.
constexpr size_t kLooksPerPage = 2;

}  // namespace

EngineShares::Account& EngineShares::open() {
  const std::lock_guard lock(mutex_);
  if (left_.empty()) return accounts_.emplace_back();
  Account* const account = left_.back();
  left_.pop_back();
  return *account;
}

void EngineShares::leave(Account& account) {
  const std::lock_guard lock(mutex_);
  left_.push_back(&account);
}

uint64_t EngineShares::block_nbytes(uint64_t stored) const {
  const uint64_t granule = pool_.granule();
  return (std::max<uint64_t>(stored, 1) + granule - 1) / granule * granule;
}

EngineShares::Admitted EngineShares::admit(Account& account, const PageBatch& batch) {
  const size_t n = batch.n_pages;
  std::vector<uint64_t> added(n);
  uint64_t nbytes = 0;
  for (size_t i = 0; i < n; ++i) nbytes += added[i] = block_nbytes(batch.length_of(i));
  const std::lock_guard lock(mutex_);
  const auto is_above = [&] { return account.charged_ + account.in_flight_ > share_; };
  account.in_flight_ += nbytes;
  if (!is_above()) return {n, nbytes};
  pool_.touch(batch.keys, n);
  std::vector<uint8_t> is_there(n);
  std::vector<Location> locations(n);
  pool_.lookup(batch.keys, n, is_there.data(), locations.data());
  bool lengths_agree = true;
  spared_.clear();
  for (size_t i = 0; i < n; ++i) {
    if (is_there[i] == 0) continue;
    account.in_flight_ -= added[i];
    nbytes -= added[i];
    added[i] = 0;
    spared_.insert(batch.keys[i]);
    lengths_agree = lengths_agree && locations[i].length == batch.length_of(i);
  }
  if (!lengths_agree) {  // the pool refuses such a batch as a whole
    account.in_flight_ -= nbytes;
    return {n, 0};
  }
  size_t n_admitted = n;
  const auto cut_while = [&](const auto& is_too_much) {
    while (n_admitted > 0 && nbytes > 0 && is_too_much()) {
      --n_admitted;
      account.in_flight_ -= added[n_admitted];
      nbytes -= added[n_admitted];
    }
  };
  cut_while([&] { return account.in_flight_ > share_; });  // nothing is to go for what can't be stored anyway
  make_room(account);
  spared_.clear();
  cut_while(is_above);
  return {n_admitted, nbytes};
}

// Takes pages out until the account is within its share, or none is left that may go.
void EngineShares::make_room(Account& account) {
  const auto is_above = [&] { return account.charged_ + account.in_flight_ > share_; };
  for (const TakeOut which : {TakeOut::kUnused, TakeOut::kAll}) {
    const bool is_sparing = which == TakeOut::kUnused;
    size_t left = is_sparing ? std::min(kMostSpared, account.pages_.size()) : account.pages_.size();
    while (is_above()) {
      const uint64_t excess = account.charged_ + account.in_flight_ - share_;
      const size_t most = std::min({left, kReviewed, account.pages_.size()});
      if (most == 0) break;
      size_t n = 0;
      for (uint64_t nbytes = 0; n < most && nbytes < excess; ++n) nbytes += account.pages_[n].nbytes;
      const size_t before = account.pages_.size();
      review_oldest(account, n, which);
      left -= n - (before - account.pages_.size());
    }
  }
}

// Forgets those of the oldest that are gone, or go; what was used, or is held, is the youngest then.
void EngineShares::review_oldest(Account& account, size_t n, TakeOut which) {
  auto& pages = account.pages_;
  reviewed_.clear();
  for (size_t i = 0; i < n; ++i) {
    const StoredPage oldest = pages.front();
    pages.pop_front();
    if (spared_.contains(oldest.key)) {
      pages.push_back(oldest);
    } else {
      reviewed_.push_back(oldest);
    }
  }
  pool_.review(reviewed_.data(), reviewed_.size(), which);
  for (const StoredPage& page : reviewed_) {
    if (page.fate == PageFate::kUsed || page.fate == PageFate::kHeld) {
      pages.push_back(page);
    } else if (page.fate != PageFate::kUnused) {
      account.charged_ -= page.nbytes;
      charged_ -= page.nbytes;
      if (page.fate == PageFate::kTakenOut) ++n_taken_out_;
    }
  }
  for (size_t i = reviewed_.size(); i-- > 0;) {  // what nobody has used stays where it is
    if (reviewed_[i].fate == PageFate::kUnused) pages.push_front(reviewed_[i]);
  }
}

void EngineShares::settle(Account& account, const Admitted& admitted, const Key* keys,
                          const PoolStatus* statuses, const Location* locations) {
  std::vector<StoredPage> stored;
  // From the back: as in the pool, the front of a batch is to go last.
  for (size_t i = admitted.n_pages; i-- > 0;) {
    if (statuses[i] != PoolStatus::kStored) continue;
    const Location& location = locations[i];
    const uint64_t packed = uint64_t{location.flags >> kPackedShift} * kPackedUnit;
    const uint64_t nbytes = block_nbytes(packed != 0 ? packed : location.length);
    stored.push_back({keys[i], location.generation & ~uint64_t{1}, 0, nbytes, PageFate::kUnused});
  }
  // It says when they were stored, by its stamps.
  for (size_t i = 0; i < stored.size(); i += kReviewed)
    pool_.review(&stored[i], std::min(kReviewed, stored.size() - i), TakeOut::kNone);
  const std::lock_guard lock(mutex_);
  account.in_flight_ -= admitted.nbytes;
  for (const StoredPage& page : stored) {
    if (page.fate == PageFate::kGone) continue;
    account.pages_.push_back(page);
    account.charged_ += page.nbytes;
    charged_ += page.nbytes;
  }
  forget_gone(kLooksPerPage * stored.size());
}

// The pool takes out whatever is the oldest, and says so to nobody here. What has gone is mostly the oldest
// here, too.
void EngineShares::forget_gone(size_t most) {
  for (size_t n_idle = 0; most > 0 && n_idle < accounts_.size() && charged_ > pool_.data_nbytes();) {
    Account& account = accounts_[hand_ % accounts_.size()];
    const size_t n = std::min({most, kReviewed, account.pages_.size()});
    const size_t before = account.pages_.size();
    if (n > 0) review_oldest(account, n, TakeOut::kNone);
    n_idle = account.pages_.size() < before ? 0 : n_idle + 1;
    most -= n;
    ++hand_;
  }
}

uint64_t EngineShares::largest_charge() {
  const std::lock_guard lock(mutex_);
  uint64_t largest = 0;
  for (const Account& account : accounts_) largest = std::max(largest, account.charged_);
  return largest;
}

size_t EngineShares::n_charges() {
  const std::lock_guard lock(mutex_);
  size_t n = 0;
  for (const Account& account : accounts_) n += account.pages_.size();
  return n;
}

}  // namespace p2pkv::attaching
