#include "cuda/landing.h"

#include <algorithm>
#include <span>
#include <utility>

namespace p2pkv::cuda {

Landing::Landing(Places places, uint64_t most_locked)
    : places_(std::move(places)),
      lengths_(places_.pieces.size() / places_.n_pieces),
      budget_{most_locked},
      noted_(lengths_.size()),
      is_there_(lengths_.size()),
      copies_(places_.devices.size()) {
  for (size_t i = 0; i < places_.pieces.size(); ++i)
    lengths_[i / places_.n_pieces] += static_cast<uint64_t>(places_.pieces[i].nbytes);
}

void Landing::take(size_t page, const uint8_t* from) {
  is_there_[page] = 0;  // it may have been brought before, and found to be no good
  noted_[n_noted_.fetch_add(1, std::memory_order_relaxed)] = {page, from};
}

void Landing::land(const MappedBytes& memory) {
  const std::span<const Noted> noted(noted_.data(), n_noted_.exchange(0, std::memory_order_relaxed));
  if (noted.empty() || !failure_.empty()) return;
  const auto lockable = std::static_pointer_cast<Lockable>(memory.kept.get([&] {
    return std::make_shared<Lockable>(memory.base, memory.nbytes, memory.is_read_only,
                                      places_.devices.front());
  }));
  for (auto& copies : copies_) copies.clear();
  std::vector<size_t> pages;
  for (const Noted& one : noted) {
    if (!lockable->lock(one.from, lengths_[one.page], &budget_)) continue;
    add(one, *lockable);
    pages.push_back(one.page);
  }
  std::vector<std::unique_ptr<CopiesUnderWay>> under_way;
  for (size_t i = 0; i < places_.devices.size(); ++i) {
    if (!copies_[i].empty())
      under_way.push_back(
          places_.devices[i]->begin_copy(copies_[i], Direction::kToDevice, HostMemory::kLocked));
  }
  // All of them, whatever becomes of one: nothing may be read here once this returns.
  for (const auto& copies : under_way) {
    std::string why;
    if (copies->wait(&why) != CopyOutcome::kDone && failure_.empty()) failure_ = why;
  }
  if (!failure_.empty()) return;
  for (const size_t page : pages) is_there_[page] = 1;
}

// The copies of a page, cut where its memory was locked in two parts.
void Landing::add(const Noted& noted, const Lockable& memory) {
  const uint8_t* from = noted.from;
  const size_t first = noted.page * places_.n_pieces;
  for (size_t i = first; i < first + places_.n_pieces; ++i) {
    auto& copies = copies_[static_cast<size_t>(places_.device_of[i])];
    auto to = static_cast<uint64_t>(places_.pieces[i].address);
    for (auto left = static_cast<uint64_t>(places_.pieces[i].nbytes); left > 0;) {
      const uint64_t n = std::min(left, static_cast<uint64_t>(memory.end_of_chunk(from) - from));
      copies.push_back({to, const_cast<uint8_t*>(from), n, memory.begins_chunk(from)});
      to += n;
      from += n;
      left -= n;
    }
  }
}

}  // namespace p2pkv::cuda
