// The packets of the shm transport's Unix socket (SOCK_SEQPACKET) and its half of a handshake.
#pragma once

#include <cstdint>

#include "net/frames.h"
#include "transports/region_endpoint.h"

namespace p2pkv::shm {

constexpr uint32_t kHelloMagic = 0x48533250;     // "P2SH"
constexpr uint32_t kEndpointMagic = 0x45533250;  // "P2SE"
constexpr uint32_t kRegionMagic = 0x52533250;    // "P2SR"
constexpr uint32_t kRequestMagic = 0x51533250;   // "P2SQ"
constexpr uint32_t kReplyMagic = 0x41533250;     // "P2SA"

// Endpoint::describe.
struct EndpointBlob {
  uint32_t magic;
  uint16_t version;
  uint16_t reserved;
  OwnerDoor door;
};
static_assert(sizeof(EndpointBlob) == 80);

enum class MapStatus : uint32_t { kGranted = 0, kNoSuchRegion = 1 };

// Owner to reader, in the order of its RegionRequests. If granted, the memfd comes along as SCM_RIGHTS.
struct MapReply {
  uint32_t magic;
  uint32_t status;
  uint32_t region;
  uint32_t reserved;
  uint64_t nbytes;
};
static_assert(sizeof(MapReply) == 24);

}  // namespace p2pkv::shm
