// What batches over several rails have in common, whatever a rail is: who gets which spans, and the counts.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "transports/rails.h"
#include "transports/transport.h"

namespace p2pkv {

// What is spread over rails goes in slices of this, or of a page: 50 us of a rail of 10 Gbit/s.
constexpr uint64_t kRailSliceBytes = 64 << 10;
// After so long a silence of all connections that are left, new ones over every rail are the better bet.
constexpr double kHopelessSeconds = 0.250, kHopelessPatiences = 4;

// The spans of `list`, by rail: in slices, each of which takes a rail of `usable`, or all over one rail.
std::vector<std::vector<uint32_t>> share_by_rail(Rails& rails, const RailSet& usable,
                                                 const std::vector<Span>& spans,
                                                 const std::vector<Word>& words,
                                                 const std::vector<uint32_t>& list, bool is_spread);

// Counts of all endpoints of a transport, by the rail's number.
struct RailCounters {
  struct Rail {
    std::atomic<uint64_t> n_bytes{0}, n_broken{0}, n_silent{0}, n_late{0}, n_retried_bytes{0};
  };
  std::array<Rail, kMostRails> rails;
  std::atomic<size_t> n_rails{0};  // the most that any endpoint has had

  void have(size_t n);  // an endpoint has so many
  std::vector<RailTotals> totals() const;
};

}  // namespace p2pkv
