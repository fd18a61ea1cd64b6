#include "base/timings.h"

#include <algorithm>
#include <utility>

namespace p2pkv {

Timings::Timings(size_t n_labels, std::vector<uint64_t> size_bounds)
    : n_labels_(n_labels), size_bounds_(std::move(size_bounds)), histograms_(n_labels * n_classes()) {}

void Timings::add(size_t label, uint64_t size, int64_t ns) {
  const auto size_class =
      std::lower_bound(size_bounds_.begin(), size_bounds_.end(), size) - size_bounds_.begin();
  const auto bucket = std::lower_bound(kBounds.begin(), kBounds.end(), ns) - kBounds.begin();
  Histogram& histogram = histograms_[label * n_classes() + static_cast<size_t>(size_class)];
  histogram.counts[static_cast<size_t>(bucket)].fetch_add(1, std::memory_order_relaxed);
  histogram.sum_ns.fetch_add(static_cast<uint64_t>(std::max<int64_t>(ns, 0)), std::memory_order_relaxed);
}

std::vector<Timings::Reading> Timings::read() const {
  std::vector<Reading> readings(histograms_.size());
  for (size_t i = 0; i < readings.size(); ++i) {
    const Histogram& histogram = histograms_[i];
    for (size_t k = 0; k < histogram.counts.size(); ++k) {
      readings[i].counts[k] = histogram.counts[k].load(std::memory_order_relaxed);
    }
    readings[i].sum_ns = histogram.sum_ns.load(std::memory_order_relaxed);
  }
  return readings;
}

}  // namespace p2pkv
