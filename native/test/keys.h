// Keys for tests.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/checksum.h"
#include "page/location.h"

namespace p2pkv::test {

// As BLAKE2b would make it: mixed in its first bytes; and different for different names.
inline Key key_of(uint64_t name) {
  Key key;
  const uint64_t hash = p2pkv::checksum(&name, sizeof name);
  std::memcpy(key.bytes, &hash, sizeof hash);
  std::memcpy(key.bytes + 8, &name, sizeof name);
  return key;
}

}  // namespace p2pkv::test
