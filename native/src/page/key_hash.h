// Page keys: 16 bytes of BLAKE2b (RFC 7693) over the namespace's digest and the key's text.
#pragma once

#include <cstddef>
#include <string_view>

#include "page/location.h"

namespace p2pkv {

// How keys that are short are hashed; one that is not there is the next.
enum class HashPath {
  kBest,     // eight at a time, by AVX-512
  kAvx2,     // four at a time
  kLibrary,  // libsodium alone
};

// Hashes `prefix` followed by each of `texts`. False if the loaded libzmq brings no libsodium: then nothing
// is hashed.
bool hash_keys(std::string_view prefix, const std::string_view* texts, size_t n, Key* keys,
               HashPath path = HashPath::kBest);

}  // namespace p2pkv
