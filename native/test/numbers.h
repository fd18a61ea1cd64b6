// What a hostile peer makes its messages of.
#pragma once

#include <cstdint>
#include <iterator>
#include <random>
#include <string>

namespace p2pkv::test {

// Numbers that are near an end, or that make a sum wrap.
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : random_(seed) {}

  uint64_t below(uint64_t n) { return random_() % n; }
  bool once_in(uint64_t n) { return below(n) == 0; }
  uint64_t u64() {
    static constexpr uint64_t kEdges[] = {
        0,        1,          63,        64,        4095, 4096, 65536, 1 << 20, (1u << 31) - 1,
        1u << 31, UINT32_MAX, INT64_MAX, 1ull << 63};
    const uint64_t edge = kEdges[below(std::size(kEdges))] + below(3) - 1;
    switch (below(4)) {
      case 0:
        return edge;
      case 1:
        return ~edge;
      case 2:
        return random_() >> below(64);
      default:
        return below(16);
    }
  }
  uint32_t u32() { return static_cast<uint32_t>(once_in(2) ? u64() : below(8)); }
  std::string text(size_t most) {
    std::string out(below(most + 1), '\0');
    for (char& c : out) c = static_cast<char>(random_());
    return out;
  }

 private:
  std::mt19937_64 random_;
};

// Cuts a message short, or changes a byte of it, now and then.
inline void spoil(Numbers& numbers, std::string* message) {
  if (message->empty()) return;
  if (numbers.once_in(12)) message->resize(numbers.below(message->size()));
  if (!message->empty() && numbers.once_in(12))
    (*message)[numbers.below(message->size())] = static_cast<char>(numbers.u32());
}

}  // namespace p2pkv::test
