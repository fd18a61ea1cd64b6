#include "disk/promotions.h"

#include <algorithm>
#include <iterator>

#include "disk/waiting.h"

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
// Of the pool that may be evicted for them, and in which time: as long as a reader remembers that it saw
// them.
constexpr uint64_t kWarmPart = 4;
constexpr double kWarmSeconds = 10;
// Leases that can be released; those beyond end by time alone. A guess.
constexpr size_t kMaxLeases = 1 << 16;
// Of the pool that one asker may pin: half of what pins may hold at all.
constexpr uint64_t kAskersPart = 4;
constexpr std::chrono::seconds kSweepEvery{1};

}  // namespace

Promotions::Promotions(Pool& pool, uint64_t warm_rate, TierCounters* counters)
    : pool_(pool),
      warm_rate_(static_cast<double>(warm_rate)),
      counters_(*counters),
      promoted_(kKeysLogged),
      warm_bytes_(warm_rate_),
      share_bytes_(static_cast<double>(pool.data_nbytes() / kWarmPart)) {}

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

void Promotions::ask(std::vector<Key> keys, Promoter::Lease lease, Deadline answer_by, Promoter::Done done) {
  const size_t n = keys.size();
  auto question = std::make_shared<Question>();
  question->done = std::move(done);
  question->found.resize(n);
  question->locations.resize(n);
  std::vector<uint64_t> tickets(n);
  uint64_t nbytes = 0;
  find_in_pool(keys, lease, question.get(), &tickets, &nbytes);
  const bool is_urgent = !answer_by.passed();
  bool is_over = true;
  {
    const std::lock_guard lock(mutex_);
    question->lease = lease_of(lease);
    if (question->lease != nullptr) {
      question->lease->nbytes += nbytes;
      std::copy_if(tickets.begin(), tickets.end(), std::back_inserter(question->lease->tickets),
                   [](uint64_t ticket) { return ticket != 0; });
    }
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

// With the lock. Null: nothing is to be kept.
std::shared_ptr<Promotions::Lease> Promotions::lease_of(Promoter::Lease asked) {
  if (asked.seconds <= 0) return nullptr;
  const auto now = Clock::now();
  if (now - swept_ > kSweepEvery) {
    std::erase_if(leases_, [now](const auto& lease) { return lease.second->end < now; });
    for (auto& [asker, leases] : by_asker_)
      std::erase_if(leases, [now](const auto& lease) { return lease->is_over || lease->end < now; });
    std::erase_if(by_asker_, [](const auto& asker) { return asker.second.empty(); });
    swept_ = now;
  }
  if (const auto known = leases_.find(asked.id); known != leases_.end()) return known->second;
  auto lease = std::make_shared<Lease>();
  lease->seconds = asked.seconds;
  lease->end = Deadline::after(asked.seconds).at();
  lease->id = asked.id;
  lease->asker = asked.asker;
  if (asked.id != 0 && leases_.size() < kMaxLeases) leases_.emplace(asked.id, lease);
  by_asker_[asked.asker].push_back(lease);
  return lease;
}

// With the lock. What an asker may still pin.
uint64_t Promotions::room_of(uint64_t asker) const {
  const uint64_t share = pool_.data_nbytes() / kAskersPart;
  const auto leases = by_asker_.find(asker);
  if (leases == by_asker_.end()) return share;
  uint64_t taken = 0;
  const auto now = Clock::now();
  for (const auto& lease : leases->second) taken += lease->is_over || lease->end < now ? 0 : lease->nbytes;
  return share - std::min(share, taken);
}

// With the lock.
void Promotions::end(Lease& lease, std::vector<uint64_t>* tickets) {
  lease.is_over = true;
  tickets->insert(tickets->end(), lease.tickets.begin(), lease.tickets.end());
  lease.tickets.clear();
}

void Promotions::release(uint64_t id) {
  std::vector<uint64_t> tickets;
  {
    const std::lock_guard lock(mutex_);
    const auto lease = leases_.find(id);
    if (lease == leases_.end()) return;
    end(*lease->second, &tickets);
    leases_.erase(lease);
  }
  unpin(tickets);
}

void Promotions::leave(uint64_t asker) {
  std::vector<uint64_t> tickets;
  {
    const std::lock_guard lock(mutex_);
    const auto leases = by_asker_.find(asker);
    if (leases == by_asker_.end()) return;
    for (const auto& lease : leases->second) {
      end(*lease, &tickets);
      const auto known = leases_.find(lease->id);
      if (known != leases_.end() && known->second == lease) leases_.erase(known);
    }
    by_asker_.erase(leases);
  }
  unpin(tickets);
}

void Promotions::unpin(const std::vector<uint64_t>& tickets) {
  std::vector<uint8_t> held(tickets.size());
  pool_.unpin(tickets.data(), tickets.size(), held.data());
}

// Pins what is there. What the limit of pins leaves out can be read too, as long as it stays: it becomes
// young, so that the pages loaded beside it, and pages that are warmed, evict others first.
void Promotions::find_in_pool(const std::vector<Key>& keys, Promoter::Lease lease, Question* question,
                              std::vector<uint64_t>* tickets, uint64_t* nbytes) {
  if (lease.seconds > 0) {
    uint64_t room = 0;
    {
      const std::lock_guard lock(mutex_);
      room = room_of(lease.asker);
    }
    pool_.pin(keys.data(), keys.size(), lease.seconds, question->found.data(), tickets->data(),
              question->locations.data(), room);
    for (const Location& location : question->locations) *nbytes += location.length;
    pool_.touch(keys.data(), keys.size());
    if (std::count(question->found.begin(), question->found.end(), 0) == 0) return;
  }
  pool_.lookup(keys.data(), keys.size(), question->found.data(), question->locations.data());
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
  if (question->lease != nullptr) load.lease_seconds = std::max(load.lease_seconds, question->lease->seconds);
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
  const auto share = static_cast<double>(pool_.data_nbytes() / kWarmPart);
  warm_bytes_ = std::min(warm_rate_, warm_bytes_ + seconds * warm_rate_);
  share_bytes_ = std::min(share, share_bytes_ + seconds * share / kWarmSeconds);
  warmed_ = now;
  return warm_bytes_ > 0;
}

// With the lock. Bytes of the pool that may be filled for nobody; `n_free` of them without evicting.
uint64_t Promotions::warm_room(uint64_t* n_free) {
  const PoolStats stats = pool_.stats();
  *n_free = stats.capacity - stats.used;
  return *n_free + static_cast<uint64_t>(std::max(0.0, share_bytes_));
}

// With the lock.
void Promotions::stop_warming() {
  for (const Key& key : warm_) {
    const auto load = loads_.find(key);
    if (load == loads_.end() || load->second.is_taken || load->second.is_urgent) continue;
    loads_.erase(load);
    ++counters_.unwarmed_pages;
  }
  warm_.clear();
}

// Waits for pages to load; false when it is over.
bool Promotions::take(std::vector<Block>* blocks, double* lease_seconds) {
  blocks->clear();
  *lease_seconds = 0;
  Lock lock(mutex_);
  while (blocks->empty()) {
    while (urgent_.empty() && (warm_.empty() || !may_warm())) {
      if (is_closing_) return false;
      disk::wait_until(wanted_, lock, Deadline::after(warm_.empty() ? 1 : kWarmPause), [this] {
        return is_closing_ || !urgent_.empty() || (!warm_.empty() && warm_bytes_ > 0);
      });
    }
    if (is_closing_) return false;
    const uint64_t limit = std::min(kMaxBytes, pool_.data_nbytes() / 8);
    if (!urgent_.empty()) {
      take_from(urgent_, limit, blocks, lease_seconds);
      continue;
    }
    uint64_t n_free = 0;
    const uint64_t room = warm_room(&n_free);
    const uint64_t nbytes = take_from(warm_, std::min(limit, room), blocks, lease_seconds);
    warm_bytes_ -= static_cast<double>(nbytes);
    share_bytes_ -= static_cast<double>(nbytes - std::min(nbytes, n_free));
    if (blocks->empty()) stop_warming();
  }
  return true;
}

// With the lock. Takes pages of at most `limit` bytes off the front; at least one of those somebody waits
// for.
uint64_t Promotions::take_from(std::deque<Key>& queue, uint64_t limit, std::vector<Block>* blocks,
                               double* lease_seconds) {
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
    const bool must_go = blocks->empty() && load->second.is_urgent;
    if (!must_go && nbytes + entry.place.length > limit) break;
    queue.pop_front();
    nbytes += entry.place.length;
    load->second.is_taken = true;
    *lease_seconds = std::max(*lease_seconds, load->second.lease_seconds);
    blocks->push_back({key, entry.place.length, entry.place.checksum});
  }
  return nbytes;
}

void Promotions::fill(std::vector<Block>& blocks, double lease_seconds) {
  const size_t n = blocks.size();
  const uint64_t since = store_->now();
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
  Loaded own{std::vector<uint8_t>(wanted.size()), std::vector<Location>(wanted.size()),
             std::vector<uint64_t>(wanted.size())};
  {
    // Under one lock: who takes a page back either keeps it out, or finds it in the pool afterwards.
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < wanted.size(); ++i) {
      is_filled[i] = statuses[i] == ReadStatus::kHit && !store_->is_recalled(keys[i], since);
    }
    pool_.commit_blocks(wanted.data(), wanted.size(), is_filled.data(), lease_seconds, own.found.data(),
                        own.tickets.data(), own.locations.data());
  }
  std::vector<Key> promoted;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (is_filled[i] == 0) continue;
    promoted.push_back(keys[i]);
    counters_.promoted_bytes += wanted[i].length;
  }
  counters_.promoted_pages += promoted.size();
  promoted_.push(promoted.data(), promoted.size());

  Loaded loaded{std::vector<uint8_t>(n), std::vector<Location>(n), std::vector<uint64_t>(n)};
  for (size_t i = 0, filled = 0; i < n; ++i) {
    const Key& key = blocks[i].key;
    if (reserved[i] == PoolStatus::kStored) {
      loaded.found[i] = own.found[filled];
      loaded.tickets[i] = own.tickets[filled];
      loaded.locations[i] = own.locations[filled++];
    } else if (reserved[i] == PoolStatus::kExists) {
      pool_.pin(&key, 1, lease_seconds, &loaded.found[i], &loaded.tickets[i], &loaded.locations[i]);
      if (loaded.found[i] == 0) pool_.lookup(&key, 1, &loaded.found[i], &loaded.locations[i]);
    }
  }
  counters_.failed_pages += static_cast<uint64_t>(std::count(loaded.found.begin(), loaded.found.end(), 0));
  settle(blocks, loaded);
}

void Promotions::wait_committed() {
  const std::lock_guard lock(mutex_);
}

// Every reader gets a pin of its own, for as long as it asked for; who has given up, none. The pin that held
// the page until then ends: it was made for the longest of all leases of its batch.
void Promotions::settle(const std::vector<Block>& blocks, const Loaded& loaded) {
  std::vector<Shared> complete;
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto load = loads_.find(blocks[i].key);
      for (const auto& [question, row] : load->second.waiting) {
        Lease* const lease = question->lease.get();
        if (loaded.tickets[i] != 0 && lease != nullptr && !lease->is_over) pin_again(blocks[i].key, *lease);
        if (question->is_answered) continue;
        question->found[row] = loaded.found[i];
        question->locations[row] = loaded.locations[i];
        if (--question->n_open > 0) continue;
        question->is_answered = true;
        complete.push_back(question);
      }
      loads_.erase(load);
    }
  }
  unpin(loaded.tickets);
  for (const Shared& question : complete) answer(question);
}

// With the lock.
void Promotions::pin_again(const Key& key, Lease& lease) {
  uint8_t found = 0;
  uint64_t ticket = 0;
  Location location;
  pool_.pin(&key, 1, lease.seconds, &found, &ticket, &location, room_of(lease.asker));
  if (ticket == 0) return;
  lease.tickets.push_back(ticket);
  lease.nbytes += location.length;
}

}  // namespace p2pkv
