#include "cache/fetch_sources.h"

#include "cache/flights.h"

namespace p2pkv {

FetchSources::Found FetchSources::gather(FetchBatch& batch, const std::vector<LocalMemory>& memories,
                                         const Deadline& deadline, const Deadline& disk_deadline) {
  Found found;
  FetchBatch::Taken own;
  found.lengths_agree = batch.take_own(&parts_.pool, deadline, &own);
  count(kOwnPool, own);
  if (parts_.tier != nullptr) {
    FetchBatch::Taken disk;
    batch.take_from_disk(parts_.tier, disk_deadline, &disk);
    count(kOwnDisk, disk);
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
    read(batch, memories, deadline);
  }
  return found;
}

void FetchSources::read(FetchBatch& batch, const std::vector<LocalMemory>& memories,
                        const Deadline& deadline) {
  Flights flights(batch, parts_.peers, memories, deadline, parts_.check_sums);
  flights.read(batch.group_by_owner(parts_.own_key));
  for (size_t way = 0; way < flights.taken().size(); ++way) count(kFirstWay + way, flights.taken()[way]);
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
