// Which members own a key's entry in the directory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "page/location.h"

namespace p2pkv {

// The ring of one view, as p2pkv/directory/ring.py computes it. Never changes.
struct RingTable {
  RingTable(std::vector<uint64_t> points, std::vector<int32_t> successors, size_t replicas,
            std::vector<uint8_t> is_healthy, int32_t own_index);

  const std::vector<uint64_t> points;     // sorted
  const std::vector<int32_t> successors;  // for each point `replicas` member indexes; -1: fewer members
  const size_t replicas;
  const std::vector<uint8_t> is_healthy;  // by member: worth asking
  const int32_t own_index;  // of the member that asks; it is never asked, and counts as having answered

  // The `replicas` owners of a key.
  const int32_t* owners_of(const Key& key) const;
  // Whether the member that asks is one of them.
  bool is_own(const Key& key) const;
  // The members that must be asked to reach every owner of the keys: healthy, and not the one that asks.
  std::vector<int32_t> peers_of(const Key* keys, size_t n) const;

 private:
  // Points are spread evenly, as hashes are: with as many parts of the circle as there are points, the first
  // point from a part's beginning on is nearly the one that is looked for.
  int part_bits_ = 0;
  std::vector<uint32_t> first_of_part_;
};

}  // namespace p2pkv
