#include "transports/rail_shares.h"

#include <algorithm>

#include "transports/batch.h"

namespace p2pkv {

std::vector<std::vector<uint32_t>> share_by_rail(Rails& rails, const RailSet& usable,
                                                 const std::vector<Span>& spans,
                                                 const std::vector<Word>& words,
                                                 const std::vector<uint32_t>& list, bool is_spread) {
  const auto slices = cut_slices(spans, words, list, is_spread ? kRailSliceBytes : UINT64_MAX);
  std::vector<uint64_t> sizes;
  for (const Slice& each : slices) sizes.push_back(each.nbytes);
  const auto chosen = rails.assign(sizes, usable);
  std::vector<std::vector<uint32_t>> of_rail(rails.n());
  for (size_t i = 0; i < slices.size(); ++i) {
    auto& share = of_rail[chosen[i]];
    share.insert(share.end(), list.begin() + static_cast<std::ptrdiff_t>(slices[i].first),
                 list.begin() + static_cast<std::ptrdiff_t>(slices[i].end));
  }
  return of_rail;
}

void RailCounters::have(size_t n) {
  for (size_t most = n_rails; most < n && !n_rails.compare_exchange_weak(most, n);) {
  }
}

std::vector<RailTotals> RailCounters::totals() const {
  std::vector<RailTotals> totals;
  for (size_t i = 0; i < n_rails; ++i) {
    const Rail& rail = rails[i];
    totals.push_back({rail.n_bytes, rail.n_broken, rail.n_silent, rail.n_late, rail.n_retried_bytes});
  }
  return totals;
}

}  // namespace p2pkv
