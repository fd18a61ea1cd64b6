// Which pairs of addresses are the rails between two hosts.
#pragma once

#include <vector>

#include "net/listener.h"
#include "transports/rails.h"

namespace p2pkv::tcp {

struct RailEnds {
  Address remote;
  const LocalAddress* local = nullptr;  // null: the kernel chooses
};

// A rail for each address of the owner, from the address here that is in its subnet; where none of them is in
// any, by position, and so that each address here has a rail as well. At most kMostRails. `locals` may be
// empty, and must outlive the result.
std::vector<RailEnds> pair_ends(const std::vector<LocalAddress>& locals, const std::vector<Address>& remotes);

}  // namespace p2pkv::tcp
