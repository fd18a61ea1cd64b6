// What UCX is told to use for a node's address, and what it finds.
#pragma once

#include <string>
#include <vector>

#include "transports/ucx/address.h"
#include "transports/ucx/context.h"

namespace p2pkv::ucx {

// Over tcp UCX lets whoever reaches its port write to any address of the process, so tcp is left out unless
// the address is loopback or the network is trusted. False, with the reason in `error`, if the user's own
// UCX_TLS asks for it nevertheless.
bool choose_settings(const Address& address, bool trusts_network, Settings* settings, std::string* error);

// The transports and devices of a context that reach other processes, as "tcp/lo".
std::vector<std::string> find_resources(const Context& context);

}  // namespace p2pkv::ucx
