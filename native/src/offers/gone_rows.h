// Rows that this node offered to whoever asks, and offers no more: they were taken or withdrawn, or have
// lapsed.
//
// Who asks for rows that were never offered waits, for they may be soon. Who asks for these would wait in
// vain, so they are remembered for a while: bounded in time, and in number, the names longest unchanged first
// to go.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"

namespace p2pkv::offers {

struct RowRange {
  uint32_t first;
  uint32_t end;
};

// Not thread-safe: its owner's lock guards it.
class GoneRows {
 public:
  // Of all names together. A name takes some hundred bytes and its own: 45 MiB with the longest names.
  static constexpr size_t kMaxRanges = 1 << 16;

  // `keep_s`: how long rows are remembered from when they, or others of their name, went.
  explicit GoneRows(double keep_s) : keep_s_(keep_s) {}

  void add(const std::string& request, RowRange rows);
  // Those among `asked`, in order and apart.
  std::vector<RowRange> among(const std::string& request, RowRange asked) const;
  // Forgets what was kept long enough.
  void tick();
  size_t n_ranges() const { return n_ranges_; }

 private:
  struct Name {
    std::string request;
    Deadline kept_until;
    std::map<uint32_t, uint32_t> ranges;  // first to end; no two touch each other
  };
  void forget_oldest();

  const double keep_s_;
  std::list<Name> by_age_;  // oldest first
  std::unordered_map<std::string, std::list<Name>::iterator> by_request_;
  size_t n_ranges_ = 0;
};

}  // namespace p2pkv::offers
