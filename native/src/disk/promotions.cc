#include "disk/promotions.h"

#include <algorithm>
#include <iterator>

#include "disk/waiting.h"
#include "page/packed_location.h"

namespace p2pkv {
namespace {

using disk::CatalogEntry;
using disk::DiskStore;

// Pages asked for and not there yet: 64 bytes of memory and more each.
constexpr size_t kMaxLoads = 1 << 16;
// Keys the directory was not told of, before the oldest are forgotten: their readers ask here again.
constexpr size_t kKeysLogged = 1 << 18;
// Leases that can be released; those beyond end by time alone. A guess.
constexpr size_t kMaxLeases = 1 << 16;
// One asker may pin this part of the pool, which is half of what pins may hold at all.
constexpr uint64_t kAskersPart = 4;
constexpr std::chrono::seconds kSweepEvery{1};

}  // namespace

Promotions::Promotions(Pool& pool, uint64_t warm_rate, TierCounters* counters)
    : pool_(pool),
      warm_rate_(static_cast<double>(warm_rate)),
      counters_(*counters),
      changed_(std::make_shared<disk::KeyLog>(kKeysLogged)),
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
  std::vector<Key> nowhere;
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
        if (question->found[i] != 0) continue;
        if (stored[i] != 0) {
          enlist(keys[i], question, i, is_urgent);
        } else {
          nowhere.push_back(keys[i]);  // whoever asks was told otherwise
        }
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
  tell_changed(nowhere);
  if (is_over) return answer(question);
  due_soon_.notify_one();
}

void Promotions::tell_changed(const std::vector<Key>& keys) {
  if (keys.empty()) return;
  changed_->push(keys.data(), keys.size());
  pool_.wake_drainer();
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
    for (const Location& location : question->locations) *nbytes += stored_nbytes(location);
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

}  // namespace p2pkv
