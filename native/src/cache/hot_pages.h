// Which pages this node's calls fetch most now, roughly and in a fixed amount of memory.
//
// The most frequent of a stream are known by the Space-Saving algorithm (Metwally, Agrawal and El Abbadi,
// 2005): a page that has no place takes that of the page with the least count, and remembers that this count
// may be the other's. So no frequent page is overlooked, and a count less what may be another's is never too
// large. Of many fetches a sample is looked at, each page with the weight of those that were not.
//
// Each page has its place in one of several sets, by its hash, as in a processor's cache: so a look costs the
// same however many places there are, and all pages of a long prompt that many requests begin with have one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <random>
#include <vector>

#include "base/clock.h"
#include "page/location.h"

namespace p2pkv {

// Thread-safe. Fetches of several threads don't wait for each other: what can't be noted at once is left out.
class HotPages {
 public:
  static constexpr size_t kSets = 64;
  static constexpr size_t kWays = 16;
  static constexpr size_t kPlaces = kSets * kWays;
  static constexpr int64_t kWindowNs = 10'000'000'000;

  struct Hot {
    Key key;
    double reads_a_second;  // at least, but for what sampling gets wrong
    uint32_t n_looks;       // that this is known from: of few the rate says little
  };

  explicit HotPages(int64_t (*now_ns)() = steady_now_ns) : now_ns_(now_ns), now_{.began_ns = now_ns()} {}

  // A fetch was asked for these pages and found those that `hits` says.
  void note(const std::vector<Key>& keys, const std::vector<uint8_t>& hits);
  // Returns those that were fetched most in the last 10 to 20 seconds, at most `most` of them.
  std::vector<Hot> list(size_t most);

 private:
  // Looked at in a window before the weight is doubled, and the greatest weight: 5 of 1,000 fetched pages at
  // a million a second.
  static constexpr uint32_t kLooksAWeight = 1024;
  static constexpr uint32_t kMostWeight = 256;

  struct Place {
    Key key;
    uint64_t count = 0;
    uint64_t over = 0;  // of it, what may be those that had the place before
    uint32_t n_looks = 0;
  };
  struct Window {
    int64_t began_ns = 0;
    uint32_t n_looks = 0;
    uint32_t weight = 1;
    std::array<uint8_t, kSets> n_places{};  // of each set, that are taken
    std::array<uint64_t, kPlaces> hashes{};
    std::array<Place, kPlaces> places{};
  };

  // All below with the lock.
  void turn();
  void look_at(const Key& key);

  int64_t (*const now_ns_)();
  std::mutex mutex_;  // guards all below
  Window now_;
  Window before_;
  bool has_before_ = false;
  uint32_t until_next_ = 1;
  std::minstd_rand chance_{std::random_device{}()};
};

}  // namespace p2pkv
