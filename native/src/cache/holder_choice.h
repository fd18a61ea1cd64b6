// Which holder of a page is read first, and which next, when one has failed or is late.
//
// Every holder that is known is tried, and one that was only late again after the others, with more patience
// each time: of several that are late one may be there, and none is worth the whole time of a call before the
// others were asked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache/holder_spread.h"
#include "directory/other_holders.h"
#include "directory/shard.h"
#include "page/location.h"

namespace p2pkv {

// What is known of the holders of the pages of one round of one fetch. Used by one thread. Knows of a page
// only once a read of it has failed: pages that nobody else has, read in time, cost it nothing.
class HolderChoice {
 public:
  enum class Fate : uint8_t {
    kUntried,
    kLate,  // it may be there
    kGone   // it does not have the page, or can't be reached
  };
  // Whether a peer is better asked later, if there is another.
  using IsSlow = std::function<bool(uint64_t owner, uint64_t boot)>;

  // Locations that `shard` does not have in its view don't count. All must outlive this.
  HolderChoice(OtherHolders& others, Shard& shard, uint64_t own_key, IsSlow is_slow)
      : others_(others), shard_(shard), own_key_(own_key), is_slow_(std::move(is_slow)) {}

  // Before a page is read: another holder to read it from than the one at `at`, where it would be; that one
  // is untried then. None if nobody else has it, or `at` was chosen. Pages come in ascending order, each
  // once.
  std::optional<Location> instead_of(size_t page, const Key& key, const Location& at, HolderSpread& spread);
  // Whether there is a holder to go on with, if the one at `at` is left now.
  bool has_next(size_t page, const Key& key, const Location& at);
  // The holder to go on with after the one at `at`, of which is known what became of it; none if no other is
  // worth a try. An untried one that is not slow comes first, a late one last.
  std::optional<Location> next(size_t page, const Key& key, const Location& at, Fate fate);
  // Has the holders that may still have the page remembered as the others of the one at `at`, where it was
  // found.
  void remember(size_t page, const Key& key, const Location& at);
  // How often the page was read in vain.
  uint32_t n_tries(size_t page) const;

 private:
  // A page is tried no more often: by then a late holder has had as long as most of a call takes.
  static constexpr uint32_t kMostTries = 12;

  struct Holder {
    Location location;
    Fate fate = Fate::kUntried;
    uint32_t last_try = 0;
  };
  struct Page {
    std::vector<Holder> holders;
    uint32_t n_tries = 0;
  };

  Page& of(size_t page, const Key& key, const Location& at);
  // Copies to `others` those that may be read as well as the one at `at`; returns how many there are.
  size_t readable_others(const Key& key, const Location& at, OtherHolders::Others* others);

  OtherHolders& others_;
  Shard& shard_;
  const uint64_t own_key_;
  const IsSlow is_slow_;
  std::unordered_map<size_t, Page> pages_;
  std::vector<std::pair<size_t, Location>> passed_over_;  // by page, in ascending order
};

}  // namespace p2pkv
