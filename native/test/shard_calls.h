// Calls of a shard for one key each, whose locations follow from the key's name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "directory/shard.h"
#include "keys.h"

namespace p2pkv::test::shards {

inline constexpr uint64_t kBoot = 5;

// Spread over stripes as BLAKE2b would.
inline Key key_of(uint64_t name) {
  Key key = test::key_of(name);
  key.bytes[15] = static_cast<uint8_t>(name);
  return key;
}

// Every field follows from the others, so that a reader can tell a torn location from a whole one.
inline Location location_of(uint64_t name, uint64_t owner, uint64_t generation, uint64_t boot = kBoot) {
  return {owner, boot,     name, owner ^ name, generation ^ name, generation, generation * 31 + name,
          0,     kResident};
}

inline bool is_whole(const Location& at, uint64_t name) {
  const Location expected = location_of(name, at.owner, at.generation, at.boot);
  return std::memcmp(&at, &expected, sizeof at) == 0;
}

inline void put(Shard& shard, uint64_t name, uint64_t owner, uint64_t sequence, uint32_t now,
                uint64_t boot = kBoot) {
  const wire::PutEntry entry{key_of(name), sequence, location_of(name, owner, sequence * 2, boot)};
  shard.put(&entry, 1, now);
}

inline void drop(Shard& shard, uint64_t name, uint64_t owner, uint64_t sequence, uint64_t generation,
                 uint32_t now) {
  const wire::DropEntry entry{key_of(name), sequence, owner, kBoot, generation};
  shard.drop(&entry, 1, now);
}

// The generation found under `name`, 0 for none.
inline uint64_t get(Shard& shard, uint64_t name) {
  const Key key = key_of(name);
  uint8_t found = 0;
  Location at{};
  shard.get(&key, 1, &found, &at);
  if (found == 0) return 0;
  CHECK(is_whole(at, name));
  return at.generation;
}

inline void set_view(Shard& shard, const std::vector<uint64_t>& owners) {
  const std::vector<uint64_t> boots(owners.size(), kBoot);
  shard.set_view(owners.data(), boots.data(), owners.size());
}

inline void confirm(Shard& shard, uint32_t first, uint32_t last) {
  for (uint32_t now = first; now <= last; ++now) shard.confirm_view(now);
}

inline void sweep_all(Shard& shard, uint32_t now) {
  for (size_t i = 0; i < Shard::kStripes; ++i) shard.sweep(now);
}

}  // namespace p2pkv::test::shards
