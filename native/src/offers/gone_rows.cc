#include "offers/gone_rows.h"

#include <algorithm>
#include <iterator>

namespace p2pkv::offers {

void GoneRows::add(const std::string& request, RowRange rows) {
  const auto known = by_request_.find(request);
  if (known == by_request_.end()) {
    by_age_.push_back({request, Deadline::after(keep_s_), {}});
    by_request_[request] = std::prev(by_age_.end());
  } else {
    by_age_.splice(by_age_.end(), by_age_, known->second);
    by_age_.back().kept_until = Deadline::after(keep_s_);
  }
  auto& ranges = by_age_.back().ranges;
  n_ranges_ -= ranges.size();
  // Ranges that overlap or touch it become one with it.
  auto next = ranges.upper_bound(rows.first);
  if (next != ranges.begin() && std::prev(next)->second >= rows.first) --next;
  while (next != ranges.end() && next->first <= rows.end) {
    rows = {std::min(rows.first, next->first), std::max(rows.end, next->second)};
    next = ranges.erase(next);
  }
  ranges.emplace(rows.first, rows.end);
  n_ranges_ += ranges.size();
  while (n_ranges_ > kMaxRanges) forget_oldest();
}

std::vector<RowRange> GoneRows::among(const std::string& request, RowRange asked) const {
  std::vector<RowRange> found;
  const auto known = by_request_.find(request);
  if (known == by_request_.end()) return found;
  const auto& ranges = known->second->ranges;
  auto range = ranges.upper_bound(asked.first);
  if (range != ranges.begin()) --range;
  for (; range != ranges.end() && range->first < asked.end; ++range) {
    const RowRange both{std::max(range->first, asked.first), std::min(range->second, asked.end)};
    if (both.first < both.end) found.push_back(both);
  }
  return found;
}

void GoneRows::tick() {
  while (!by_age_.empty() && by_age_.front().kept_until.passed()) forget_oldest();
}

void GoneRows::forget_oldest() {
  n_ranges_ -= by_age_.front().ranges.size();
  by_request_.erase(by_age_.front().request);
  by_age_.pop_front();
}

}  // namespace p2pkv::offers
