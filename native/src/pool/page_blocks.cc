#include "pool/page_blocks.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/radix_sort.h"
#include "page/words.h"

namespace p2pkv {

PageBlocks::PageBlocks(PageTable& pages, uint8_t* words, uint32_t n_granules, uint64_t first_word,
                       std::function<void(uint32_t)> on_evict)
    : pages_(pages),
      words_(words),
      on_evict_(std::move(on_evict)),
      space_(n_granules),
      sizes_(pages, n_granules),
      ages_(n_granules),
      last_generation_(first_word - 1) {}

void PageBlocks::adopt(const std::vector<KeptRecords::Left>& pages) {
  std::vector<uint32_t> gaps;
  std::vector<std::pair<uint64_t, uint32_t>> by_use;
  by_use.reserve(pages.size());
  uint32_t end = 0;
  for (const KeptRecords::Left& left : pages) {
    if (left.granule > end) {
      space_.take(end, left.granule - end);
      gaps.push_back(end);
    }
    space_.take(left.granule, left.n_granules);
    end = left.granule + left.n_granules;
    n_used_ += left.n_granules;
    Page& page = pages_[left.granule];
    page.state = PageState::kCommitted;
    page.size = sizes_.enter_exactly(left.n_granules);
    ages_.add(run_of(left.granule), page.stamp);
    by_use.emplace_back(uint64_t{page.stamp}, left.granule);
  }
  for (const uint32_t gap : gaps) space_.release(gap);
  radix_sort(&by_use);  // by place those of one use: so they were read
  for (size_t i = 0; i < by_use.size(); ++i) {
    if (i + PageTable::kAhead < by_use.size()) pages_.prefetch_record(by_use[i + PageTable::kAhead].second);
    sizes_.link_used_at(by_use[i].second, by_use[i].first);
  }
  if (!by_use.empty()) sizes_.go_on_from(by_use.back().first + 1);
}

void PageBlocks::leave(uint32_t page) {
  sizes_.unlink(page);
  pages_[page].state = PageState::kLeft;
}

PageBlocks::Search PageBlocks::search_for(uint32_t n_granules, const Share& share) {
  Search search;
  search.share_ = share;
  search.size_ = sizes_.enter(n_granules, share.account);
  if (search.size_ >= windows_.size()) {
    windows_.resize(search.size_ + 1);
    last_searches_.resize(search.size_ + 1);
    scan_ends_.resize(search.size_ + 1);
  }
  last_searches_[search.size_] = sizes_.n_committed();
  return search;
}

void PageBlocks::give_up(const Search& search) {
  sizes_.leave(search.size_);
}

PageBlocks::Found PageBlocks::reserve(Search* search) {
  turn_ = {};
  const Found found = find_room(search);
  if (std::exchange(has_hidden_, false)) store_fence();
  if (found == Found::kNoRoom) give_up(*search);
  if (found != Found::kBlock) return found;
  const uint32_t block = search->block;
  require_own(block, sizes_.n_granules(search->size_));
  pages_[block] = Page{};
  pages_[block].size = search->size_;
  pages_[block].state = PageState::kReserved;
  pages_[block].generation = load_word(word_at(block));
  pages_[block].stamp = sizes_.now();
  // no window is of use where a batch is being written: nothing there may go
  ages_.add(run_of(block), pages_[block].stamp);
  return found;
}

// Going on would hand readers another page's bytes as right. Words alone can't show that a block is free: the
// even word of a page that begins before it, and reaches into it, lies outside. The blocks' ends can.
void PageBlocks::require_own(uint32_t block, uint32_t n_granules) const {
  const uint64_t word = load_word(word_at(block));
  if (space_.is_taken_whole(block, n_granules) && !is_committed(word)) return;
  std::fprintf(stderr, "p2pkv: bug: the pool's block of %u granules at %u, word %llu, is not free\n",
               n_granules, block, static_cast<unsigned long long>(word));
  std::abort();
}

void PageBlocks::commit(uint32_t block) {
  Page& page = pages_[block];
  page.state = PageState::kCommitted;
  last_generation_ += 2;
  page.generation = last_generation_;
  // before the word: whoever finds it even after this process was killed finds the record whole
  if (kept_ != nullptr) kept_->write(block, page, space_.length_of(block), sizes_.now());
  store_word(word_at(block), page.generation);
  ages_.touch(run_of(block), page.stamp, sizes_.now());
  sizes_.link(block);
  sizes_.committed(space_.length_of(block));
}

void PageBlocks::drop(uint32_t block) {
  pages_[block].state = PageState::kNone;
  ages_.remove(run_of(block), pages_[block].stamp);
  sizes_.leave(pages_[block].size);
  n_used_ -= space_.length_of(block);
  space_.release(block);
}

void PageBlocks::retract(uint32_t page) {
  hide(page);
  store_fence();
  if (!pages_[page].is_held()) drop(page);
}

// Its word turns odd, and is odd for others once the caller has fenced, before the block can be reused: a
// reader that overlaps that must find the page stale.
void PageBlocks::hide(uint32_t granule) {
  Page& page = pages_[granule];
  ++page.generation;
  store_word_ahead(word_at(granule), page.generation);
  page.state = PageState::kRetracted;
  sizes_.unlink(granule);
}

void PageBlocks::touch(uint32_t page) {
  ages_.touch(run_of(page), pages_[page].stamp, sizes_.now());
  sizes_.unlink(page);
  sizes_.link(page);
  keep_use(page);
}

void PageBlocks::leased(uint32_t page) {
  ages_.hold(run_of(page));
}

void PageBlocks::unleased(uint32_t page) {
  ages_.let_go(run_of(page));
}

uint32_t PageBlocks::next_page(uint32_t* at, uint32_t most_steps) const {
  for (uint32_t step = 0; step < most_steps && *at < n_granules(); ++step) {
    const uint32_t granule = *at;
    if (!space_.starts_block(granule)) {  // freed pages have merged into a block that begins before
      ++*at;
      continue;
    }
    *at += space_.length_of(granule);
    if (!space_.is_free(granule) && pages_[granule].state == PageState::kCommitted) return granule;
  }
  return kNone;
}

void PageBlocks::walk_oldest(const std::function<bool(uint32_t page)>& take) const {
  std::vector<uint32_t> heads(sizes_.n_sizes());
  for (uint32_t size = 0; size < heads.size(); ++size) heads[size] = sizes_.oldest(size);
  for (;;) {
    uint32_t* best = nullptr;
    for (uint32_t& head : heads) {
      if (head != kNone && (best == nullptr || pages_[head].stamp < pages_[*best].stamp)) best = &head;
    }
    if (best == nullptr || !take(*best)) return;
    *best = pages_[*best].newer;
  }
}

}  // namespace p2pkv
