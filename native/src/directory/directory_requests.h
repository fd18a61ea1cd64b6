// What a shard answers to GET, PUT and DROP, whichever way they come.
#pragma once

#include <cstdint>
#include <string>

#include "p2pkv/shard.h"
#include "p2pkv/wire.h"

namespace p2pkv {

bool is_directory_request(wire::Kind kind);

// The whole reply, header included, of the node that runs under `boot`. `body` is what follows the header.
std::string answer_directory_request(Shard& shard, const wire::Header& header, wire::Reader body,
                                     uint64_t boot);

}  // namespace p2pkv
