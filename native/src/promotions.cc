#include "promotions.h"

#include <algorithm>

#include "p2pkv/disk/waiting.h"

namespace p2pkv {
namespace {

using disk::CatalogEntry;
using disk::DiskStore;
using disk::ReadStatus;

// Of one read of the store, so that the first pages are there while the others are still read.
constexpr size_t kMaxPages = 64;
constexpr uint64_t kMaxBytes = 8 << 20;
// Pages asked for and not there yet: 64 bytes of memory and more each.
constexpr size_t kMaxLoads = 1 << 16;
// A disk that takes longer for one read counts as broken here.
constexpr double kReadSeconds = 2;
// Keys the directory was not told of, before the oldest are forgotten: their readers ask here again.
constexpr size_t kKeysLogged = 1 << 18;
// While only pages wait that nobody waits for, and their time has not come.
constexpr double kWarmPause = 0.01;

}  // namespace

Promotions::Promotions(Pool& pool, uint64_t warm_rate, TierCounters* counters)
    : pool_(pool),
      warm_rate_(static_cast<double>(warm_rate)),
      counters_(*counters),
      promoted_(kKeysLogged),
      warm_bytes_(warm_rate_) {}

bool Promotions::start() {
  for (NamedThread& loader : loaders_) {
    if (!loader.start("p2pkv-promote", [this] { load_all(); })) return false;
  }
  return answerer_.start("p2pkv-promised", [this] { answer_in_time(); });
}

void Promotions::attach(DiskStore* store) {
  const std::lock_guard lock(mutex_);
  store_ = store;
}

void Promotions::close() {
  const std::lock_guard only_one(closing_);
  std::vector<Shared> open;
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
    for (const auto& [at, question] : open_) {
      if (!std::exchange(question->is_answered, true)) open.push_back(question);
    }
    open_.clear();
  }
  wanted_.notify_all();
  due_soon_.notify_all();
  for (NamedThread& loader : loaders_) loader.join();
  answerer_.join();
  for (const Shared& question : open) answer(question);
  const std::lock_guard lock(mutex_);
  loads_.clear();
  urgent_.clear();
  warm_.clear();
}

// --- questions

void Promotions::ask(std::vector<Key> keys, double lease_seconds, Deadline answer_by, Promoter::Done done) {
  const size_t n = keys.size();
  auto question = std::make_shared<Question>();
  question->lease_seconds = lease_seconds;
  question->done = std::move(done);
  question->found.resize(n);
  question->locations.resize(n);
  find_in_pool(keys, *question);
  const bool is_urgent = !answer_by.passed();
  bool is_over = true;
  {
    const std::lock_guard lock(mutex_);
    if (store_ != nullptr && !is_closing_) {
      std::vector<uint8_t> stored(n);
      std::vector<CatalogEntry> entries(n);
      store_->look_up(keys.data(), n, stored.data(), entries.data());
      for (size_t i = 0; i < n; ++i) {
        if (question->found[i] == 0 && stored[i] != 0) enlist(keys[i], question, i, is_urgent);
      }
    }
    is_over = question->n_open == 0 || !is_urgent;
    if (is_over) {
      question->is_answered = true;
    } else {
      open_.emplace(answer_by.at(), question);
    }
  }
  wanted_.notify_all();
  if (is_over) return answer(question);
  due_soon_.notify_one();
}

// Pins what is there. What the limit of pins leaves out can be read too, as long as it stays.
void Promotions::find_in_pool(const std::vector<Key>& keys, Question& question) {
  std::vector<uint64_t> tickets(keys.size());
  if (question.lease_seconds > 0) {
    pool_.pin(keys.data(), keys.size(), question.lease_seconds, question.found.data(), tickets.data(),
              question.locations.data());
    if (std::count(question.found.begin(), question.found.end(), 0) == 0) return;
  }
  pool_.lookup(keys.data(), keys.size(), question.found.data(), question.locations.data());
}

// With the lock.
void Promotions::enlist(const Key& key, const Shared& question, size_t row, bool is_urgent) {
  const auto known = loads_.find(key);
  if (known == loads_.end() && loads_.size() >= kMaxLoads) {
    ++counters_.refused_pages;
    return;
  }
  Load& load = known == loads_.end() ? loads_[key] : known->second;
  if (known == loads_.end() || (is_urgent && !load.is_urgent && !load.is_taken)) {
    (is_urgent ? urgent_ : warm_).push_back(key);
    load.is_urgent = is_urgent;
  }
  if (!is_urgent) return;
  load.lease_seconds = std::max(load.lease_seconds, question->lease_seconds);
  load.waiting.emplace_back(question, row);
  ++question->n_open;
}

void Promotions::answer(const Shared& question) {
  question->done(std::move(question->found), std::move(question->locations));
}

void Promotions::answer_in_time() {
  while (true) {
    std::vector<Shared> late;
    {
      Lock lock(mutex_);
      if (is_closing_) return;
      const auto now = Clock::now();
      while (!open_.empty() && open_.begin()->first <= now) {
        const Shared& question = open_.begin()->second;
        if (!std::exchange(question->is_answered, true)) {
          counters_.late_pages += question->n_open;
          late.push_back(question);
        }
        open_.erase(open_.begin());
      }
      if (late.empty()) {
        const auto first = open_.empty() ? now + std::chrono::hours(1) : open_.begin()->first;
        const Deadline until = Deadline::after(std::chrono::duration<double>(first - now).count());
        disk::wait_until(due_soon_, lock, until,
                         [&] { return is_closing_ || (!open_.empty() && open_.begin()->first < first); });
        continue;
      }
    }
    for (const Shared& question : late) answer(question);
  }
}

// --- loading

void Promotions::load_all() {
  std::vector<Block> blocks;
  double lease_seconds = 0;
  while (take(&blocks, &lease_seconds)) fill(blocks, lease_seconds);
}

// With the lock.
bool Promotions::may_warm() {
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - warmed_).count();
  warm_bytes_ = std::min(warm_rate_, warm_bytes_ + seconds * warm_rate_);
  warmed_ = now;
  return warm_bytes_ > 0;
}

// Waits for pages to load; false when it is over.
bool Promotions::take(std::vector<Block>* blocks, double* lease_seconds) {
  blocks->clear();
  *lease_seconds = 0;
  Lock lock(mutex_);
  while (urgent_.empty() && (warm_.empty() || !may_warm())) {
    if (is_closing_) return false;
    disk::wait_until(wanted_, lock, Deadline::after(warm_.empty() ? 1 : kWarmPause), [this] {
      return is_closing_ || !urgent_.empty() || (!warm_.empty() && warm_bytes_ > 0);
    });
  }
  if (is_closing_) return false;
  const bool is_urgent = !urgent_.empty();
  std::deque<Key>& queue = is_urgent ? urgent_ : warm_;
  const uint64_t limit = std::min(kMaxBytes, pool_.data_nbytes() / 8);
  uint64_t nbytes = 0;
  while (!queue.empty() && blocks->size() < kMaxPages) {
    const Key key = queue.front();
    const auto load = loads_.find(key);
    if (load == loads_.end() || load->second.is_taken) {  // loaded already: it was on both queues
      queue.pop_front();
      continue;
    }
    uint8_t is_stored = 0;
    CatalogEntry entry;
    store_->look_up(&key, 1, &is_stored, &entry);
    if (is_stored == 0)
      entry.place.length = 1;  // gone since it was asked for: any length will do, its read misses
    if (!blocks->empty() && nbytes + entry.place.length > limit) break;
    queue.pop_front();
    nbytes += entry.place.length;
    load->second.is_taken = true;
    *lease_seconds = std::max(*lease_seconds, load->second.lease_seconds);
    blocks->push_back({key, entry.place.length, entry.place.checksum});
  }
  if (!is_urgent) warm_bytes_ -= static_cast<double>(nbytes);
  return true;
}

void Promotions::fill(std::vector<Block>& blocks, double lease_seconds) {
  const size_t n = blocks.size();
  std::vector<PoolStatus> reserved(n);
  pool_.reserve_blocks(blocks.data(), n, reserved.data());
  std::vector<Block> wanted;
  std::vector<Key> keys;
  std::vector<Piece> pieces;
  for (size_t i = 0; i < n; ++i) {
    if (reserved[i] != PoolStatus::kStored) continue;
    wanted.push_back(blocks[i]);
    keys.push_back(blocks[i].key);
    pieces.push_back({reinterpret_cast<int64_t>(blocks[i].data), static_cast<int64_t>(blocks[i].length)});
  }
  std::vector<ReadStatus> statuses(wanted.size());
  store_->read({wanted.size(), 1, keys.data(), pieces.data()}, Deadline::after(kReadSeconds),
               statuses.data());
  std::vector<uint8_t> is_filled(wanted.size());
  std::vector<Key> promoted;
  for (size_t i = 0; i < wanted.size(); ++i) {
    is_filled[i] = statuses[i] == ReadStatus::kHit;
    if (is_filled[i] == 0) continue;
    promoted.push_back(keys[i]);
    counters_.promoted_bytes += wanted[i].length;
  }
  std::vector<uint8_t> there(wanted.size());
  std::vector<Location> where(wanted.size());
  pool_.commit_blocks(wanted.data(), wanted.size(), is_filled.data(), lease_seconds, there.data(),
                      where.data());
  counters_.promoted_pages += promoted.size();
  promoted_.push(promoted.data(), promoted.size());

  std::vector<uint8_t> found(n);
  std::vector<Location> locations(n);
  for (size_t i = 0, filled = 0; i < n; ++i) {
    if (reserved[i] == PoolStatus::kStored) {
      found[i] = there[filled];
      locations[i] = where[filled++];
    } else if (reserved[i] == PoolStatus::kExists) {
      pool_.lookup(&blocks[i].key, 1, &found[i], &locations[i]);
    }
  }
  counters_.failed_pages += static_cast<uint64_t>(std::count(found.begin(), found.end(), 0));
  settle(blocks, found, locations);
}

void Promotions::settle(const std::vector<Block>& blocks, const std::vector<uint8_t>& found,
                        const std::vector<Location>& locations) {
  std::vector<Shared> complete;
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto load = loads_.find(blocks[i].key);
      for (const auto& [question, row] : load->second.waiting) {
        if (question->is_answered) continue;
        question->found[row] = found[i];
        question->locations[row] = locations[i];
        if (--question->n_open > 0) continue;
        question->is_answered = true;
        complete.push_back(question);
      }
      loads_.erase(load);
    }
  }
  for (const Shared& question : complete) answer(question);
}

}  // namespace p2pkv
