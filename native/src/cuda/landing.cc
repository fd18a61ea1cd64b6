#include "cuda/landing.h"

#include <span>
#include <utility>

namespace p2pkv::cuda {

Landing::Landing(PagePlaces::Pages pages, uint64_t most_locked)
    : places_(std::move(pages), most_locked), noted_(places_.n_pages()), is_there_(places_.n_pages()) {}

void Landing::take(size_t page, const uint8_t* from) {
  is_there_[page] = 0;  // it may have been brought before, and found to be no good
  noted_[n_noted_.fetch_add(1, std::memory_order_relaxed)] = {page, from};
}

void Landing::land(const MappedBytes& memory) {
  const std::span<const Noted> noted(noted_.data(), n_noted_.exchange(0, std::memory_order_relaxed));
  if (noted.empty() || !failure_.empty()) return;
  std::vector<size_t> pages;
  for (const Noted& one : noted) {
    if (places_.add(one.page, one.from, memory)) pages.push_back(one.page);
  }
  // All of them, whatever becomes of one: nothing may be read here once this returns.
  places_.begin(Direction::kToDevice).wait(&failure_);
  if (!failure_.empty()) return;
  for (const size_t page : pages) is_there_[page] = 1;
}

}  // namespace p2pkv::cuda
