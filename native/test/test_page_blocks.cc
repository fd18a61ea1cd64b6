// The pool's blocks against a model: pages are copied in by halves while others are evicted, pinned,
// retracted and dropped, and every location that ever was must lead to the bytes it was given for, or show
// that it is stale.
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <vector>

#include "base/checksum.h"
#include "check.h"
#include "keys.h"
#include "page/words.h"
#include "pool/page_blocks.h"
#include "seed.h"

namespace {

using p2pkv::Page;
using p2pkv::PageBlocks;
using p2pkv::PageState;
using p2pkv::PageTable;
using p2pkv::test::key_of;

constexpr uint32_t kNone = PageBlocks::kNone;
constexpr uint64_t kFirstWord = 1001;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kSlowdown = 20;
#else
constexpr uint64_t kSlowdown = 1;
#endif

// A pool without memory: a page's bytes are one number a granule.
struct Model {
  // What a reader may know, for as long as it likes.
  struct Location {
    uint32_t block = 0;
    uint32_t length = 0;  // 0: there is none
    uint64_t generation = 0;
    uint64_t name = 0;
  };
  struct Draft {
    uint32_t block;
    uint32_t length;
    uint64_t name;
    uint32_t n_written = 0;
  };

  explicit Model(uint32_t n_granules)
      : pages(n_granules),
        words(n_granules, kFirstWord),
        bytes(n_granules),
        blocks(pages, reinterpret_cast<uint8_t*>(words.data()), n_granules, kFirstWord,
               [this](uint32_t page) { evict(page); }) {}

  void evict(uint32_t page) {
    CHECK(pages[page].state == PageState::kCommitted && !pages[page].is_held());
    CHECK_EQ(words[page], pages[page].generation);
    evicted.push_back(page);
    pages.erase(page);
    ++n_evicted;
  }

  // A reserved block, or kNone. `between()` is called where others would be let in.
  template <typename Between>
  uint32_t reserve(uint32_t n, Between between) {
    auto search = blocks.search_for(n);
    for (;;) {
      const auto found = blocks.reserve(&search);
      if (found == PageBlocks::Found::kNoRoom) return kNone;
      if (found == PageBlocks::Found::kBlock) {
        CHECK(blocks.length_of(search.block) >= n);
        return search.block;
      }
      ++n_again;
      between();
    }
  }
  uint32_t reserve(uint32_t n) {
    return reserve(n, [] {});
  }

  Location commit(uint32_t block, uint32_t length, uint64_t name) {
    pages[block].key = key_of(name);
    blocks.commit(block);
    pages.insert(block);
    CHECK(pages[block].generation > last_generation);  // none is used twice
    last_generation = pages[block].generation;
    return {block, length, pages[block].generation, name};
  }
  // A page of `n` granules, whole; its location has no length if there was no room.
  Location publish(uint32_t n, uint64_t name) {
    const uint32_t block = reserve(n);
    if (block == kNone) return {};
    std::fill_n(bytes.begin() + block, n, name);
    return commit(block, n, name);
  }
  void retract(uint32_t page) {
    pages.erase(page);
    blocks.retract(page);
  }
  void pin(uint32_t page) {
    if (pages[page].n_leases++ == 0) blocks.leased(page);
  }
  void unpin(uint32_t page) {
    if (--pages[page].n_leases > 0) return;
    blocks.unleased(page);
    if (pages[page].state == PageState::kRetracted) blocks.drop(page);
  }

  bool is_there(const Location& location) const {
    return location.length > 0 && words[location.block] == location.generation;
  }
  // What a reader that has the location would read now, or that it is stale.
  void check(const Location& location) {
    if (!is_there(location)) return;
    ++n_validated;
    for (uint32_t i = 0; i < location.length; ++i) CHECK_EQ(bytes[location.block + i], location.name);
  }
  // A word is even only where a page begins, and then it is the page's generation.
  void check_words() {
    uint32_t at = 0;
    uint32_t next = blocks.next_page(&at, UINT32_MAX);
    for (uint32_t granule = 0; granule < words.size(); ++granule) {
      CHECK_EQ(granule == next, p2pkv::is_committed(words[granule]));
      if (granule != next) continue;
      CHECK_EQ(words[granule], pages[granule].generation);
      next = blocks.next_page(&at, UINT32_MAX);
    }
  }
  uint32_t n_paged() const {
    uint32_t n = 0;
    uint32_t at = 0;
    for (;;) {
      const uint32_t page = blocks.next_page(&at, UINT32_MAX);
      if (page == kNone) return n;
      n += blocks.length_of(page);
    }
  }

  PageTable pages;
  std::vector<uint64_t> words;
  std::vector<uint64_t> bytes;
  PageBlocks blocks;
  std::vector<uint32_t> evicted;  // in order
  uint64_t last_generation = 0;
  uint64_t n_evicted = 0;
  uint64_t n_again = 0;
  uint64_t n_validated = 0;
};

// Publishes, pins, retracts and gives up at random, and reads through old locations all the while.
class Churn {
 public:
  Churn(uint32_t n_granules, std::vector<uint32_t> sizes, uint64_t seed)
      : model_(n_granules), sizes_(std::move(sizes)), random_(seed), known_(4000), n_granules_(n_granules) {}

  void run(uint64_t n_publishes) {
    for (uint64_t name = 1; name <= n_publishes; ++name) {
      begin(name);
      write_drafts();
      for (int i = 0; i < 3; ++i) use_some_page();
      if (!pinned_.empty() && random_() % 4 == 0) unpin_one();
      if (name % 16 == 0) model_.check(known_[random_() % known_.size()]);
      if (name % 200 == 0) check_all();
    }
    while (!drafts_.empty()) write_drafts();
    while (!pinned_.empty()) unpin_one();
    check_all();
    uint32_t at = 0;
    for (uint32_t page; (page = model_.blocks.next_page(&at, UINT32_MAX)) != kNone;) model_.retract(page);
    CHECK_EQ(model_.blocks.n_used(), 0u);
    CHECK(model_.publish(n_granules_, 7).length > 0);  // everything has merged again
    std::cout << "        " << n_granules_ << " granules: " << model_.n_evicted << " evicted, "
              << model_.n_validated << " old locations were right, " << n_refused_ << " found no room, "
              << model_.n_again << " turns ended early\n";
    CHECK(model_.n_validated > n_publishes / 100);
  }

 private:
  // Mostly of one size, which changes now and then; so sizes fall asleep and wake.
  uint32_t some_size(uint64_t name) {
    return sizes_[random_() % 10 < 7 ? name / 3000 % sizes_.size() : random_() % sizes_.size()];
  }

  void begin(uint64_t name) {
    const uint32_t n = some_size(name);
    const uint32_t block = model_.reserve(n, [this] {
      for (int i = 0; i < 3; ++i) use_some_page();
    });
    n_refused_ += block == kNone ? 1 : 0;
    if (block != kNone) drafts_.push_back({block, n, name});
  }

  // Half of a page's bytes at a time; then it may wait, is committed, or given up.
  void write_drafts() {
    for (size_t i = drafts_.size(); i-- > 0;) {
      Model::Draft& draft = drafts_[i];
      const uint32_t until = draft.n_written == 0 ? (draft.length + 1) / 2 : draft.length;
      for (; draft.n_written < until; ++draft.n_written)
        model_.bytes[draft.block + draft.n_written] = draft.name;
      if (draft.n_written < draft.length || random_() % 3 == 0) continue;
      if (random_() % 20 == 0) {
        model_.blocks.drop(draft.block);
      } else {
        known_[random_() % known_.size()] = model_.commit(draft.block, draft.length, draft.name);
      }
      draft = drafts_.back();
      drafts_.pop_back();
    }
  }

  void use_some_page() {
    uint32_t at = static_cast<uint32_t>(random_() % n_granules_);
    const uint32_t page = model_.blocks.next_page(&at, 1000);
    if (page == kNone) return;
    const uint64_t what = random_() % 40;
    if (what < 20) {
      model_.blocks.touch(page);
    } else if (what < 22 && pinned_.size() < 40) {
      model_.pin(page);
      pinned_.push_back({page, model_.blocks.length_of(page), 0, model_.bytes[page]});
    } else if (what == 22) {
      model_.retract(page);
    }
  }

  // Its bytes have stayed, even if it was retracted.
  void unpin_one() {
    std::swap(pinned_[random_() % pinned_.size()], pinned_.back());
    const Model::Location pinned = pinned_.back();
    pinned_.pop_back();
    CHECK_EQ(model_.bytes[pinned.block], pinned.name);
    CHECK_EQ(model_.bytes[pinned.block + pinned.length - 1], pinned.name);
    model_.unpin(pinned.block);
  }

  void check_all() {
    model_.check_words();
    for (const Model::Location& location : known_) model_.check(location);
  }

  Model model_;
  const std::vector<uint32_t> sizes_;
  std::mt19937_64 random_;
  std::vector<Model::Draft> drafts_;
  std::vector<Model::Location> pinned_;
  std::vector<Model::Location> known_;
  const uint32_t n_granules_;
  uint64_t n_refused_ = 0;
};

TEST(page_blocks_no_old_location_leads_to_other_bytes) {
  const uint64_t seed = p2pkv::test::seed("page_blocks");
  const uint64_t n = 60000 / kSlowdown;
  Churn(5000, {9, 576, 4096}, seed).run(n);
  Churn(5000, {1, 3, 700}, seed).run(n);
  Churn(12000, {576, 752, 1098}, seed).run(n);
  Churn(700, {1, 2, 5, 7, 33, 90}, seed).run(n);
  std::vector<uint32_t> many;
  for (uint32_t i = 0; i < 90; ++i) many.push_back(3 + i * 5);
  Churn(20000, many, seed).run(n);
}

}  // namespace
