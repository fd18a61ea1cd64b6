// Histograms as the lines that Prometheus reads. A page of metrics has a thousand of them that differ in
// their numbers alone, so what stands before these is put together once.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "base/timings.h"

namespace p2pkv {

// Immutable.
class TimingsText {
 public:
  // One histogram has so many: its buckets, how many there are, and their sum.
  static constexpr size_t kLines = Timings::kBounds.size() + 3;

  // An exemplar stands behind the number of a line.
  struct Note {
    size_t line;
    std::string text;
  };

  // `head` stands before all, `starts` before each number: kLines for each histogram.
  TimingsText(std::string head, std::vector<std::string> starts)
      : head_(std::move(head)), starts_(std::move(starts)) {}

  size_t n_lines() const { return starts_.size(); }
  // `timings` has n_lines() / kLines histograms. Of several notes of a line the last one counts.
  std::string write(const Timings& timings, const std::vector<Note>& notes) const;

 private:
  const std::string head_;
  const std::vector<std::string> starts_;
};

}  // namespace p2pkv
