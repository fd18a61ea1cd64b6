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
#include "page/packed_location.h"
#include "peers/peer_connections.h"

namespace p2pkv {

// What is known of the holders of the pages of one round of one fetch. Used by one thread. Knows of a page
// only once a read of it has failed: pages that nobody else has, read in time, cost it nothing.
class HolderChoice {
 public:
  enum class Fate : uint8_t {
    kUntried,
    kLate,  // it may be there
    kAway,  // it can't be reached for now, and is not tried again; it may have the page
    kGone   // it does not have the page, or is lost
  };
  // Returns whether a peer is better asked later than others: the more, the larger.
  using LaterBy = std::function<uint32_t(uint64_t owner, uint64_t boot)>;

  // Locations that `shard` does not have in its view don't count. All must outlive this.
  HolderChoice(OtherHolders& others, Shard& shard, uint64_t own_key, LaterBy later_by)
      : others_(others), shard_(shard), own_key_(own_key), later_by_(std::move(later_by)) {}

  // The usual `LaterBy`: who need not be connected to comes first, and last who was late a moment ago, or is
  // a suspect.
  static uint32_t later_by(const PeerConnections::Standing& standing);

  // Whether `spread` may choose another holder of a page than the one at `at`; true for some of which there
  // is none. A location that proves nothing stays where it is seen that it does not.
  bool may_choose(const Key& key, const Location& at) const {
    return at.owner != own_key_ && can_prove(at) && others_.may_know(key);
  }
  // Before anything is read: has those of these pages, numbers in ascending order, that others hold too read
  // from the holders that are chosen. Where they would have been read from otherwise is untried then.
  void spread(const std::vector<size_t>& pages, const std::vector<Key>& keys,
              std::vector<Location>* locations, HolderSpread& spread);
  // Whether there is a holder to go on with, if the one at `at` is left now.
  bool has_next(size_t page, const Key& key, const Location& at);
  // Says whether there is one that was not tried yet. Pages that nobody else has take no lock for that.
  bool has_untried(size_t page, const Key& key, const Location& at);
  // The holder to go on with after the one at `at`, of which is known what became of it; none if no other is
  // worth a try. An untried one comes before those that were late.
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
  static bool is_worth_a_try(const Holder& holder) {
    return holder.fate == Fate::kUntried || holder.fate == Fate::kLate;
  }
  struct Page {
    std::vector<Holder> holders;
    uint32_t n_tries = 0;
  };

  // Where a page would have been read from, if another holder was chosen; null if not.
  const Location* passed_over(size_t page) const;
  Page& of(size_t page, const Key& key, const Location& at);
  // Whether another holder may be read as well as the one at `at`, if it is in the view.
  bool is_readable(const Location& other, const Location& at) const;

  OtherHolders& others_;
  Shard& shard_;
  const uint64_t own_key_;
  const LaterBy later_by_;
  std::unordered_map<size_t, Page> pages_;
  std::vector<std::pair<size_t, Location>> passed_over_;  // by page, in ascending order
};

}  // namespace p2pkv
