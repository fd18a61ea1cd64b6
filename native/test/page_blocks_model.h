// The pool's blocks without memory: a page's bytes are one number a granule.
#pragma once

#include <time.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"
#include "keys.h"
#include "page/words.h"
#include "pool/page_blocks.h"

namespace {

using p2pkv::Page;
using p2pkv::PageBlocks;
using p2pkv::PageState;
using p2pkv::PageTable;
using p2pkv::test::key_of;

constexpr uint32_t kNone = PageBlocks::kNone;
constexpr uint64_t kFirstWord = 1001;

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
        lengths(n_granules),
        blocks(pages, reinterpret_cast<uint8_t*>(words.data()), n_granules, kFirstWord,
               [this](uint32_t page) { evict(page); }) {}

  // Of this thread: others take the processor away for milliseconds, on a busy machine.
  int64_t cpu_now_ns() const {
    if (!is_timed) return 0;
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  }

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
      const uint64_t before = n_evicted;
      const int64_t began = cpu_now_ns();
      const auto found = blocks.reserve(&search);
      if (is_timed) turns_ns.push_back(cpu_now_ns() - began);
      CHECK(n_evicted - before <= 64);
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
    lengths[block] = length;
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
  std::vector<uint32_t> lengths;  // of pages, by their first granule: a block may be longer than its page
  PageBlocks blocks;
  std::vector<uint32_t> evicted;  // in order
  uint64_t last_generation = 0;
  uint64_t n_evicted = 0;
  uint64_t n_again = 0;
  bool is_timed = false;
  std::vector<int64_t> turns_ns;  // of the CPU, where they are timed
  uint64_t n_validated = 0;
};

}  // namespace
