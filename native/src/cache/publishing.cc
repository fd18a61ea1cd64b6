#include "cache/publishing.h"

#include <utility>

#include "net/wire.h"

namespace p2pkv {

Publishing::Publishing(std::shared_ptr<const RingTable> ring, std::vector<DirectoryLine> lines)
    : ring_(std::move(ring)), lines_(std::move(lines)) {}

void Publishing::run(Pool& pool, const PageBatch& batch, Shard& own, Sequences& sequences, Tier* tier,
                     const Deadline& deadline) {
  const size_t n = batch.n_pages;
  std::vector<PoolStatus> statuses(n);
  std::vector<Location> locations(n);
  n_hidden_ = pool.publish(batch, statuses.data(), locations.data(), deadline);
  // Drawn now: what is said of earlier pages of the same keys must not seem younger.
  const uint64_t sequence = sequences.next();
  entries_.resize(n);
  std::vector<uint8_t> is_left_out(n);
  for (size_t i = 0; i < n; ++i) {
    const bool is_stored = statuses[i] == PoolStatus::kStored;
    const bool is_readable = is_stored || statuses[i] == PoolStatus::kExists;
    entries_[i] = {batch.keys[i], sequence, locations[i]};
    is_left_out[i] = is_readable ? 0 : 1;
    n_readable_ += is_readable ? 1 : 0;
    stored_bytes_ += is_stored ? locations[i].length : 0;
    n_late_ += statuses[i] == PoolStatus::kTimedOut ? 1 : 0;
    n_changed_ += statuses[i] == PoolStatus::kChanged ? 1 : 0;
  }
  ask_ = std::make_unique<AskBatch>(batch.keys, n, is_left_out.data(), ring_);
  // first the peers, who then work while the own shard does
  exchange_ = std::make_unique<DirectoryExchange>(
      *ask_,
      DirectoryQuestion{wire::Kind::kPut, reinterpret_cast<const uint8_t*>(entries_.data()),
                        sizeof(wire::PutEntry)},
      lines_);
  std::vector<wire::PutEntry> entries;
  for (size_t i = 0; i < n; ++i) {
    if (ask_->answered()[i] != 0) entries.push_back(entries_[i]);
  }
  own.put(entries.data(), entries.size(), own.now());
  if (tier != nullptr && n_readable_ > 0) tier->note_published(batch.keys, n);
}

void Publishing::wait(const Deadline& deadline, const Deadline& patience) {
  exchange_->wait(deadline, patience);
}

std::vector<uint8_t> Publishing::end(const Deadline& patience) {
  return exchange_->end(patience);
}

}  // namespace p2pkv
