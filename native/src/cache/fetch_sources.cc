#include "cache/fetch_sources.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "cache/flights.h"
#include "cache/holder_spread.h"

namespace p2pkv {

FetchSources::Found FetchSources::gather(FetchBatch& batch, const std::vector<LocalMemory>& memories,
                                         const Deadline& deadline, const Deadline& disk_deadline) {
  Found found;
  FetchBatch::Taken own;
  const Stopwatch copying;
  found.lengths_agree = batch.take_own(&parts_.pool, deadline, &own);
  took_own(batch, own, copying);
  if (parts_.of_host) gather_from_host(batch, deadline);
  if (parts_.tier != nullptr) {
    FetchBatch::Taken disk;
    const Stopwatch reading;
    batch.take_from_disk(parts_.tier, disk_deadline, &disk);
    count(kOwnDisk, disk);
    if (disk.n_pages > 0) {
      parts_.watched.reads->add(kOwnDisk, disk.nbytes, reading.ns());
      batch.came_from(FetchBatch::kFromOwnDisk);
    }
    parts_.tier->note_fetched(batch.keys().data(), batch.n_pages());
  }
  const size_t n_located = batch.locate_cached(&parts_.locations, &parts_.shard);
  n_located_.fetch_add(n_located, std::memory_order_relaxed);
  uint64_t length = 0;
  uint64_t expected = 0;
  const bool is_all_known = batch.unlocated().empty() && batch.cold(parts_.own_key).empty() &&
                            batch.find_other_length(&length, &expected) < 0;
  if (n_located > 0 && is_all_known) {
    found.has_read = true;
    read(batch, memories, deadline, {});
  }
  if (batch.is_over()) ended(batch);
  return found;
}

void FetchSources::gather_taken(FetchBatch& batch, const std::vector<LocalMemory>& memories,
                                const Deadline& deadline) {
  FetchBatch::Taken own;
  const Stopwatch copying;
  batch.take_own(&parts_.pool, deadline, &own);
  took_own(batch, own, copying);
  const size_t n_located = batch.locate_cached(&parts_.locations, &parts_.shard);
  if (n_located > 0 && !deadline.passed()) read(batch, memories, deadline, {.is_elsewhere_good = false});
  // Another batch looks once more for what is left, and counts it.
  std::vector<Key> came;
  for (size_t page = 0; page < batch.n_pages(); ++page) {
    if (batch.outcomes()[page] != 0) came.push_back(batch.keys()[page]);
  }
  n_located_.fetch_add(came.size() - own.n_pages, std::memory_order_relaxed);
  if (parts_.tier != nullptr) parts_.tier->note_fetched(came.data(), came.size());
  if (batch.is_over()) return ended(batch);
  hot_.note(batch.keys(), batch.outcomes());
}

void FetchSources::took_own(FetchBatch& batch, const FetchBatch::Taken& own, const Stopwatch& copying) {
  if (own.n_pages == 0) return;
  count(kOwnPool, own);
  parts_.watched.reads->add(kOwnPool, own.nbytes, copying.ns());
  batch.came_from(FetchBatch::kFromOwnPool);
}

// Its pages count as the own ones: an engine has no others.
void FetchSources::gather_from_host(FetchBatch& batch, const Deadline& deadline) {
  const auto pool = parts_.of_host->get();
  if (!pool) return;
  const Stopwatch copying;
  FetchBatch::Taken taken;
  std::vector<size_t> pages;
  const auto what = parts_.of_host->findable(*pool);
  const size_t n_guests = batch.take_mapped(*pool, what, parts_.check_sums, deadline, &taken, &pages);
  n_hosts_guests_.fetch_add(n_guests, std::memory_order_relaxed);
  took_own(batch, taken, copying);
  if (parts_.touches && !pages.empty())
    parts_.touches->note({pool->owner(), pool->boot()}, batch.keys(), pages);
}

void FetchSources::read(FetchBatch& batch, const std::vector<LocalMemory>& memories, const Deadline& deadline,
                        const Round& round) {
  std::optional<HolderChoice> choice;
  std::optional<Flights::Elsewhere> elsewhere;
  std::vector<PeerId> to_connect;
  if (parts_.others && round.is_elsewhere_good) {
    const auto later_by = [this](uint64_t owner, uint64_t boot) {
      return HolderChoice::later_by(parts_.peers.standings({{owner, boot}}).front());
    };
    choice.emplace(*parts_.others, parts_.shard, parts_.own_key, later_by);
    elsewhere.emplace(Flights::Elsewhere{*choice, hedges_, round.may_look_again});
    to_connect = spread(batch, *choice);
  }
  Flights flights(batch, parts_.peers, memories, deadline, parts_.check_sums,
                  elsewhere ? &*elsewhere : nullptr);
  flights.read(batch.group_by_owner(parts_.own_key));
  for (size_t way = 0; way < flights.taken().size(); ++way) {
    count(kFirstWay + way, flights.taken()[way]);
    if (flights.taken()[way].n_pages > 0) batch.came_from(FetchBatch::kFromPeers);
  }
  if (parts_.touches && round.is_use) batch.note_reads(parts_.touches.get());
  if (choice) batch.remember_rerouted(&parts_.locations, *choice);
  for (const Flights::Landed& landed : flights.landed()) {
    parts_.watched.reads->add(kFirstWay + landed.way, landed.nbytes, landed.ns);
  }
  for (const PeerId& peer : to_connect) parts_.peers.connect_ahead(peer);
}

std::vector<PeerId> FetchSources::spread(FetchBatch& batch, HolderChoice& choice) {
  const uint64_t draw = parts_.own_key + n_spread_.fetch_add(1, std::memory_order_relaxed);
  HolderSpread spread(draw,
                      [this](const std::vector<PeerId>& peers) { return parts_.peers.standings(peers); });
  batch.spread(choice, spread);
  if (spread.has_avoided_slow()) hedges_.count(Hedges::kSlow);
  return spread.to_connect();
}

std::array<uint64_t, FetchBatch::kMissKinds> FetchSources::finish(FetchBatch& batch, bool has_promoted) {
  if (has_promoted && batch.farthest() == FetchBatch::kFromPeers) batch.came_from(FetchBatch::kFromPeersDisk);
  ended(batch);
  const auto misses = batch.misses();
  if (misses[FetchBatch::kTimedOut] > 0) n_late_calls_.fetch_add(1, std::memory_order_relaxed);
  for (size_t page = 0; parts_.watched.history && page < batch.n_pages(); ++page) {
    if (batch.outcomes()[page] != 0) continue;
    const auto row = static_cast<int64_t>(page);
    const auto event = static_cast<size_t>(PageEvent::kMissed) + batch.why_missed(page);
    parts_.watched.history->note(batch.key(row), static_cast<PageEvent>(event), batch.location(row).owner);
  }
  return misses;
}

void FetchSources::ended(const FetchBatch& batch) {
  hot_.note(batch.keys(), batch.outcomes());
  parts_.watched.fetches->add(batch.farthest(), batch.nbytes(), batch.stopwatch().ns());
  n_rejected_.fetch_add(batch.n_failed_checks(FetchBatch::kRejected), std::memory_order_relaxed);
  n_bad_sums_.fetch_add(batch.n_failed_checks(FetchBatch::kChecksum), std::memory_order_relaxed);
}

std::vector<FetchBatch::Taken> FetchSources::fetched() const {
  std::vector<FetchBatch::Taken> all;
  for (const Count& count : fetched_) all.push_back({count.n_pages, count.nbytes});
  return all;
}

void FetchSources::count(size_t source, const FetchBatch::Taken& taken) {
  fetched_[source].n_pages.fetch_add(taken.n_pages, std::memory_order_relaxed);
  fetched_[source].nbytes.fetch_add(taken.nbytes, std::memory_order_relaxed);
}

}  // namespace p2pkv
