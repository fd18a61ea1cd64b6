// Seeds of random tests: printed, and replayed with P2PKV_SEED.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

namespace p2pkv::test {

inline uint64_t seed(const char* test) {
  const char* given = std::getenv("P2PKV_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::cout << "        " << test << ": P2PKV_SEED=" << seed << std::endl;
  return seed;
}

}  // namespace p2pkv::test
