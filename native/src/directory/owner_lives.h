// In which boots of which members pages are where locations say, by a view.
//
// A page ends with the boot in which it was stored, unless the memory of its owner's pool outlives the
// process (pool/kept_records.h). A member whose does says since which boot it is the same memory: what was
// told of its places in all boots from that one on still holds, and is proven or refuted by the page's word
// as ever.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "page/location.h"

namespace p2pkv {

class OwnerLives {
 public:
  struct Life {
    uint64_t owner;
    uint64_t boot;
    uint64_t since;        // the first boot whose pages are still there; `boot`, if its memory is not kept
    bool is_away = false;  // no member now, and may come back with its pages

    bool has(uint64_t earlier) const { return since <= earlier && earlier <= boot; }
  };

  OwnerLives() = default;
  explicit OwnerLives(const std::vector<Life>& lives) {
    for (const Life& life : lives) lives_.emplace(life.owner, life);
  }

  bool is_present(uint64_t owner) const {
    const auto found = lives_.find(owner);
    return found != lives_.end() && !found->second.is_away;
  }
  // The boot that the owner has now, if the page may be read there; else 0, which no boot is.
  uint64_t boot_now(const Location& at) const {
    const Life* const life = life_of(at);
    return life != nullptr && !life->is_away ? life->boot : 0;
  }
  bool counts(const Location& at) const { return boot_now(at) != 0; }
  // Whether it may be, once its owner is back.
  bool may_come_back(const Location& at) const {
    const Life* const life = life_of(at);
    return life != nullptr && life->is_away;
  }
  // Whether both boots of the owner have the same pages.
  bool is_one_life(uint64_t owner, uint64_t a, uint64_t b) const {
    if (a == b) return true;
    const auto found = lives_.find(owner);
    return found != lives_.end() && found->second.has(a) && found->second.has(b);
  }

 private:
  const Life* life_of(const Location& at) const {
    const auto found = lives_.find(at.owner);
    return found != lives_.end() && found->second.has(at.boot) ? &found->second : nullptr;
  }

  std::unordered_map<uint64_t, Life> lives_;
};

}  // namespace p2pkv
