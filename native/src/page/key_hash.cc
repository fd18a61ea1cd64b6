#include "page/key_hash.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/zmq_api.h"
#include "page/hash_lanes.h"

namespace p2pkv {
namespace {

void hash_with_library(std::string_view prefix, std::string_view text, Key* key) {
  std::string message;
  message.reserve(prefix.size() + text.size());
  message.append(prefix).append(text);
  ZmqApi::get().generichash(key->bytes, sizeof *key, reinterpret_cast<const unsigned char*>(message.data()),
                            message.size(), nullptr, 0);
}

#if defined(__x86_64__)

template <size_t kLanes>
using HashFunction = void (*)(const HashLanes<kLanes>&, Key* const*);

template <size_t kLanes, HashFunction<kLanes> hash>
void hash_by_lanes(std::string_view prefix, const std::string_view* texts, size_t n, Key* keys) {
  HashLanes<kLanes> lanes;
  std::array<Key*, kLanes> targets;
  Key unused;
  size_t n_filled = 0;
  const auto flush = [&] {
    for (size_t lane = n_filled; lane < kLanes; ++lane) {
      targets[lane] = &unused;
      std::memset(lanes.blocks[lane], 0, kHashBlockBytes);
      lanes.lengths[lane] = 0;
    }
    hash(lanes, targets.data());
    n_filled = 0;
  };
  for (size_t i = 0; i < n; ++i) {
    const size_t nbytes = prefix.size() + texts[i].size();
    if (nbytes > kHashBlockBytes) {
      hash_with_library(prefix, texts[i], &keys[i]);
      continue;
    }
    uint8_t* block = lanes.blocks[n_filled];
    std::memset(block, 0, kHashBlockBytes);  // all of it: that its length is known makes up for what is twice
    std::memcpy(block, prefix.data(), prefix.size());
    if (!texts[i].empty()) std::memcpy(block + prefix.size(), texts[i].data(), texts[i].size());
    lanes.lengths[n_filled] = nbytes;
    targets[n_filled] = &keys[i];
    if (++n_filled == kLanes) flush();
  }
  if (n_filled > 0) flush();
}

#endif

}  // namespace

bool hash_keys(std::string_view prefix, const std::string_view* texts, size_t n, Key* keys, HashPath path) {
  if (ZmqApi::get().generichash == nullptr) return false;
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  static const bool has_avx512 = __builtin_cpu_supports("avx512f");
  if (has_avx512 && path == HashPath::kBest) {
    hash_by_lanes<8, hash_lanes_avx512>(prefix, texts, n, keys);
    return true;
  }
  if (has_avx2 && path != HashPath::kLibrary) {
    hash_by_lanes<4, hash_lanes_avx2>(prefix, texts, n, keys);
    return true;
  }
#endif
  for (size_t i = 0; i < n; ++i) hash_with_library(prefix, texts[i], &keys[i]);
  return true;
}

}  // namespace p2pkv
