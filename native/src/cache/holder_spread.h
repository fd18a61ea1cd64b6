// Which of the holders of a page a fetch reads first.
//
// A page that many read is with several nodes, and each of these is to have its part of the work: one that
// takes longer a smaller one. Nobody is told of loads for that: how long its reads take says it to each
// reader.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "page/location.h"

namespace p2pkv {

// The choice of one fetch: pages that the same nodes hold are read from the same one of them, so that each of
// several fetches is read in one go, and another one in the next fetch. Used by one thread.
class HolderSpread {
 public:
  // Says how long reads of the fetch's size take from a peer as a rule, 0 if that is not known.
  using UsualNs = std::function<int64_t(uint64_t owner, uint64_t boot)>;

  // Equal draws choose alike: readers are to differ, and so are their fetches.
  HolderSpread(uint64_t draw, UsualNs usual_ns) : draw_(draw), usual_ns_(std::move(usual_ns)) {}

  // Returns the number of the one to read from, of those of one page.
  size_t choose(const Location* holders, size_t n);

 private:
  // Who takes up to so many times as long as the fastest is given as much: what differs by less is noise.
  static constexpr int64_t kAlike = 2;
  // Who takes many times as long is read now and then all the same: else nobody would see it get faster.
  static constexpr double kLeastWeight = 1.0 / 64;

  struct Holder {
    uint64_t owner;
    uint64_t boot;
    int64_t usual_ns;
    double wait;  // exponentially distributed, of mean 1: among these the least one is a fair draw
  };

  const Holder& of(const Location& location);

  const uint64_t draw_;
  const UsualNs usual_ns_;
  std::vector<Holder> known_;  // those of the pages so far: few
};

}  // namespace p2pkv
