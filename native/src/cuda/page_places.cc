#include "cuda/page_places.h"

#include <algorithm>
#include <utility>

namespace p2pkv::cuda {

CopyOutcome PlacedCopies::wait(std::string* failure) {
  CopyOutcome worst = CopyOutcome::kDone;
  for (const auto& copies : under_way) {
    std::string why;
    const CopyOutcome outcome = copies->wait(&why);
    if (outcome != CopyOutcome::kDone && failure->empty()) *failure = why;
    worst = std::max(worst, outcome);
  }
  return worst;
}

PagePlaces::PagePlaces(Pages pages, uint64_t most_locked)
    : pages_(std::move(pages)),
      lengths_(pages_.pieces.size() / pages_.n_pieces),
      budget_{most_locked},
      copies_(pages_.devices.size()) {
  for (size_t i = 0; i < pages_.pieces.size(); ++i)
    lengths_[i / pages_.n_pieces] += static_cast<uint64_t>(pages_.pieces[i].nbytes);
}

std::shared_ptr<Lockable> PagePlaces::lockable_of(const MappedBytes& memory) const {
  return std::static_pointer_cast<Lockable>(memory.kept.get([&] {
    return std::make_shared<Lockable>(memory.base, memory.nbytes, memory.is_read_only,
                                      pages_.devices.front());
  }));
}

// The copies are cut where the memory was locked in two parts.
bool PagePlaces::add(size_t page, const uint8_t* host, const MappedBytes& memory) {
  const auto lockable = lockable_of(memory);
  if (!lockable->lock(host, lengths_[page], &budget_)) return false;
  if (memories_.empty() || memories_.back() != lockable) memories_.push_back(lockable);
  for (size_t i = page * pages_.n_pieces; i < (page + 1) * pages_.n_pieces; ++i) {
    auto& copies = copies_[static_cast<size_t>(pages_.device_of[i])];
    auto there = static_cast<uint64_t>(pages_.pieces[i].address);
    for (auto left = static_cast<uint64_t>(pages_.pieces[i].nbytes); left > 0;) {
      const uint64_t n = std::min(left, static_cast<uint64_t>(lockable->end_of_chunk(host) - host));
      copies.push_back({there, const_cast<uint8_t*>(host), n, lockable->begins_chunk(host)});
      there += n;
      host += n;
      left -= n;
    }
  }
  return true;
}

PlacedCopies PagePlaces::begin(Direction direction) {
  PlacedCopies begun{std::exchange(memories_, {}), {}};
  for (size_t i = 0; i < copies_.size(); ++i) {
    if (copies_[i].empty()) continue;
    begun.under_way.push_back(pages_.devices[i]->begin_copy(copies_[i], direction, HostMemory::kLocked));
    copies_[i].clear();
  }
  return begun;
}

}  // namespace p2pkv::cuda
