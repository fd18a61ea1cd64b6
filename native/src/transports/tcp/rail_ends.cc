#include "transports/tcp/rail_ends.h"

#include <algorithm>

namespace p2pkv::tcp {

std::vector<RailEnds> pair_ends(const std::vector<LocalAddress>& locals,
                                const std::vector<Address>& remotes) {
  const auto near = [&](const Address& remote) -> const LocalAddress* {
    const auto found = std::find_if(locals.begin(), locals.end(),
                                    [&](const LocalAddress& local) { return is_in_subnet(local, remote); });
    return found != locals.end() ? &*found : nullptr;
  };
  std::vector<RailEnds> rails;
  const bool is_routed = std::none_of(remotes.begin(), remotes.end(), near);
  const size_t n = std::max(remotes.size(), is_routed ? locals.size() : 0);
  for (size_t i = 0; i < std::min(n, kMostRails); ++i) {
    const Address& remote = remotes[i % remotes.size()];
    const LocalAddress* local = near(remote);
    if (is_routed && !locals.empty()) {
      const LocalAddress& at = locals[i % locals.size()];
      if (at.address.family == remote.family) local = &at;
    }
    rails.push_back({remote, local});
  }
  return rails;
}

}  // namespace p2pkv::tcp
