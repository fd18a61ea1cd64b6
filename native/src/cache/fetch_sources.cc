#include "cache/fetch_sources.h"

#include "cache/flights.h"

namespace p2pkv {

FetchSources::Found FetchSources::gather(FetchBatch& batch, const std::vector<LocalMemory>& memories,
                                         const Deadline& deadline, const Deadline& disk_deadline) const {
  Found found;
  found.lengths_agree = batch.take_own(&pool, deadline, &found.own);
  if (tier != nullptr) {
    batch.take_from_disk(tier, disk_deadline, &found.disk);
    tier->note_fetched(batch.keys().data(), batch.n_pages());
  }
  found.n_located = batch.locate_cached(&locations, &shard);
  uint64_t length = 0;
  uint64_t expected = 0;
  const bool is_all_known = batch.unlocated().empty() && batch.cold(own_key).empty() &&
                            batch.find_other_length(&length, &expected) < 0;
  if (found.n_located > 0 && is_all_known) {
    found.has_read = true;
    found.read = read(batch, memories, deadline);
  }
  return found;
}

std::vector<FetchBatch::Taken> FetchSources::read(FetchBatch& batch, const std::vector<LocalMemory>& memories,
                                                  const Deadline& deadline) const {
  Flights flights(batch, peers, memories, deadline, check_sums);
  flights.read(batch.group_by_owner(own_key));
  return flights.taken();
}

}  // namespace p2pkv
