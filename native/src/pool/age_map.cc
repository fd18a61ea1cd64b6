#include "pool/age_map.h"

#include <algorithm>
#include <bit>

namespace p2pkv {
namespace {

// A held granule weighs as much as this many of the youngest pages: windows there come to little.
constexpr int64_t kHeldWeight = 4;

uint32_t bits_of_unit(uint32_t n_granules, uint32_t most_units) {
  uint32_t bits = 0;
  while (((n_granules - 1) >> bits) >= most_units) ++bits;
  return bits;
}

}  // namespace

AgeMap::AgeMap(uint32_t n_granules)
    : n_granules_(n_granules),
      unit_bits_(bits_of_unit(n_granules, kMostUnits)),
      n_units_(((n_granules - 1) >> unit_bits_) + 1) {}

// Calls `change(unit, granules of the page there)`.
template <typename Change>
void AgeMap::for_each_unit(const Run& page, Change change) {
  const uint32_t end = page.begin + page.length;
  for (uint32_t at = page.begin; at < end;) {
    const uint32_t unit = at >> unit_bits_;
    const uint32_t next = std::min((unit + 1) << unit_bits_, end);
    change(units_[unit], next - at);
    at = next;
  }
}

void AgeMap::add(const Run& page, uint64_t stamp) {
  for_each_unit(page, [&](Unit& unit, uint32_t n) {
    unit.stamps += stamp * n;
    unit.n_live += n;
  });
}

void AgeMap::remove(const Run& page, uint64_t stamp) {
  for_each_unit(page, [&](Unit& unit, uint32_t n) {
    unit.stamps -= stamp * n;
    unit.n_live -= n;
  });
}

void AgeMap::touch(const Run& page, uint64_t stamp, uint64_t now) {
  if (stamp == now) return;
  for_each_unit(page, [&](Unit& unit, uint32_t n) { unit.stamps += (now - stamp) * n; });
}

void AgeMap::hold(const Run& page) {
  for_each_unit(page, [](Unit& unit, uint32_t n) { unit.n_held += n; });
}

void AgeMap::let_go(const Run& page) {
  for_each_unit(page, [](Unit& unit, uint32_t n) { unit.n_held -= n; });
}

void AgeMap::close(uint32_t begin, uint32_t end) {
  for (uint32_t unit = begin >> unit_bits_; unit <= (end - 1) >> unit_bits_; ++unit) is_closed_[unit] = true;
}

uint32_t AgeMap::oldest_stretch(uint32_t n_granules, uint64_t eldest_stamp, uint64_t now,
                                uint64_t n_committed, uint64_t rest) {
  const uint32_t n_wanted = std::min(n_units_, ((n_granules - 1) >> unit_bits_) + 1);
  const auto is_out = [&](uint32_t i) {
    const Unit& unit = units_[i];
    return is_closed_[i] || (unit.n_held > 0 && unit.named > 0 && n_committed - unit.named < rest);
  };
  // How much younger than the eldest its pages are together. Exact: the sums wrap, and this is far from it.
  const auto youth = [&](uint32_t i) {
    const Unit& unit = units_[i];
    const auto of_pages = static_cast<int64_t>(unit.stamps - eldest_stamp * unit.n_live);
    return of_pages +
           kHeldWeight * static_cast<int64_t>(unit.n_held) * static_cast<int64_t>(now - eldest_stamp);
  };
  int64_t sum = 0;
  int64_t least = 0;
  uint32_t n_out = 0;
  uint32_t first = kNone;
  for (uint32_t i = 0; i < n_units_; ++i) {
    sum += youth(i);
    n_out += is_out(i) ? 1 : 0;
    if (i >= n_wanted) {
      sum -= youth(i - n_wanted);
      n_out -= is_out(i - n_wanted) ? 1 : 0;
    }
    if (i + 1 < n_wanted || n_out > 0 || (first != kNone && sum >= least)) continue;
    least = sum;
    first = i + 1 - n_wanted;
  }
  if (first == kNone) return kNone;
  for (uint32_t i = first; i < first + n_wanted; ++i) units_[i].named = std::max<uint64_t>(n_committed, 1);
  return first << unit_bits_;
}

}  // namespace p2pkv
