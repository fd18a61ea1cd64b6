// Which of the holders of a page a fetch reads first.
//
// A page that many read is with several nodes, and each of these is to have its part of the work: one that
// takes longer a smaller one. Nobody is told of loads for that: how long its reads take says it to each
// reader. No call connects to anybody for it: who is drawn and has no connection is to have one by the next
// call, and this one reads from somebody else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "page/location.h"
#include "peers/peer_connections.h"

namespace p2pkv {

// The choice of one fetch: pages that the same nodes hold are read from the same one of them, so that each of
// several fetches is read in one go, and another one in the next fetch. Used by one thread.
class HolderSpread {
 public:
  // Says how each of these peers stands.
  using Look = std::function<std::vector<PeerConnections::Standing>(const std::vector<PeerId>&)>;

  // Equal draws choose alike: readers are to differ, and so are their fetches.
  HolderSpread(uint64_t draw, Look look) : draw_(draw), look_(std::move(look)) {}

  // Has these holders looked at, among which are all that are to be chosen from. `nbytes`: of their pages.
  void know(const std::vector<Location>& holders, uint64_t nbytes);
  // Returns the number of the one to read from, of those of one page: the first one if none is connected, or
  // all that are were late a moment ago.
  size_t choose(const Location* holders, size_t n);
  // Returns those that were drawn and are not connected, where others were, some at a time: a reader that
  // fetches so rarely that its connections are closed meanwhile connects to nobody for later.
  std::vector<PeerId> to_connect() const;
  // Whether one was drawn that was late a moment ago, and another one chosen, not the first one.
  bool has_avoided_slow() const { return has_avoided_slow_; }

 private:
  // Who takes up to so many times as long as the fastest is given as much: what differs by less is noise.
  static constexpr double kAlike = 2;
  // Who takes many times as long is read now and then all the same: else nobody would see it get faster.
  static constexpr double kLeastWeight = 1.0 / 64;

  // Each connection is opened by a thread of its own; the next fetch begins more.
  static constexpr size_t kMostToConnect = 4;

  struct Holder {
    PeerId peer;
    PeerConnections::Standing standing{};
    Pace::Usual usual{};   // 0 if it is not known
    double wait = 0;       // exponentially distributed, of mean 1: among these the least one is a fair draw
    bool is_slow = false;  // late a moment ago
    bool is_to_connect = false;
  };

  static bool is_ready(const Holder& holder) { return holder.standing.is_connected && !holder.is_slow; }

  size_t number_of(const Location& location) const;

  const uint64_t draw_;
  const Look look_;
  std::vector<Holder> known_;  // few
  bool has_avoided_slow_ = false;
};

}  // namespace p2pkv
