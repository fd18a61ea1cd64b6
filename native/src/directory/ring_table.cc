#include "directory/ring_table.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace p2pkv {

RingTable::RingTable(std::vector<uint64_t> points_in, std::vector<int32_t> successors_in, size_t replicas_in,
                     std::vector<uint8_t> is_healthy_in, int32_t own_index_in)
    : points(std::move(points_in)),
      successors(std::move(successors_in)),
      replicas(replicas_in),
      is_healthy(std::move(is_healthy_in)),
      own_index(own_index_in) {
  part_bits_ = std::max(1, static_cast<int>(std::bit_width(points.size())));
  const size_t n_parts = size_t{1} << part_bits_;
  first_of_part_.reserve(n_parts);
  size_t point = 0;
  for (uint64_t part = 0; part < n_parts; ++part) {
    while (point < points.size() && points[point] < part << (64 - part_bits_)) ++point;
    first_of_part_.push_back(static_cast<uint32_t>(point));
  }
}

const int32_t* RingTable::owners_of(const Key& key) const {
  const uint64_t hash = hash_of(key);
  size_t point = first_of_part_[hash >> (64 - part_bits_)];
  while (point < points.size() && points[point] < hash) ++point;
  return successors.data() + (point == points.size() ? 0 : point) * replicas;
}

bool RingTable::is_own(const Key& key) const {
  if (points.empty()) return false;
  const int32_t* owners = owners_of(key);
  return std::find(owners, owners + replicas, own_index) != owners + replicas;
}

std::vector<int32_t> RingTable::peers_of(const Key* keys, size_t n) const {
  std::vector<int32_t> peers;
  if (points.empty()) return peers;
  std::vector<uint8_t> is_listed(is_healthy.size());
  for (size_t row = 0; row < n; ++row) {
    const int32_t* owners = owners_of(keys[row]);
    for (size_t i = 0; i < replicas && owners[i] >= 0; ++i) {
      const auto member = static_cast<size_t>(owners[i]);
      if (owners[i] == own_index || is_healthy[member] == 0 || is_listed[member] != 0) continue;
      is_listed[member] = 1;
      peers.push_back(owners[i]);
    }
  }
  return peers;
}

}  // namespace p2pkv
