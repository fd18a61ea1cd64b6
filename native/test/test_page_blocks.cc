// The pool's blocks against a model: pages are copied in by halves while others are evicted, pinned,
// retracted and dropped, and every location that ever was must lead to the bytes it was given for, or show
// that it is stale.
#include <cstdint>
#include <iostream>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "page_blocks_model.h"
#include "seed.h"

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kSlowdown = 20;
#else
constexpr uint64_t kSlowdown = 1;
#endif

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
      pinned_.push_back({page, model_.lengths[page], 0, model_.bytes[page]});
    } else if (what == 22) {
      model_.retract(page);
    }
  }

  // Its bytes have stayed, even if it was retracted.
  void unpin_one() {
    std::swap(pinned_[random_() % pinned_.size()], pinned_.back());
    const Model::Location pinned = pinned_.back();
    pinned_.pop_back();
    for (uint32_t i = 0; i < pinned.length; ++i) CHECK_EQ(model_.bytes[pinned.block + i], pinned.name);
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
