// Which pairs of addresses are the rails between two hosts, and what has become of reads over them.
#pragma once

#include <array>
#include <atomic>
#include <vector>

#include "net/listener.h"
#include "transports/rails.h"
#include "transports/transports.h"

namespace p2pkv::tcp {

struct RailEnds {
  Address remote;
  const LocalAddress* local = nullptr;  // null: the kernel chooses
};

// A rail for each address of the owner, from the address here that is in its subnet; where none of them is in
// any, by position, and so that each address here has a rail as well. At most kMostRails. `locals` may be
// empty, and must outlive the result.
std::vector<RailEnds> pair_ends(const std::vector<LocalAddress>& locals, const std::vector<Address>& remotes);

// Counts of all endpoints of a transport, by the rail's number.
struct RailCounters {
  struct Rail {
    std::atomic<uint64_t> n_bytes{0}, n_broken{0}, n_silent{0}, n_late{0}, n_retried_bytes{0};
  };
  std::array<Rail, kMostRails> rails;
  std::atomic<size_t> n_rails{0};  // the most that any endpoint has had

  std::vector<RailTotals> totals() const;
};

}  // namespace p2pkv::tcp
