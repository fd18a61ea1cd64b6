// What the verbs transport puts into handshakes. docs/transports.md has the byte tables.
#pragma once

#include <cstdint>

#include "net/frames.h"

namespace p2pkv::verbs {

constexpr uint32_t kEndpointMagic = 0x45563250;  // "P2VE"
constexpr uint32_t kRegionMagic = 0x52563250;    // "P2VR"

// Network cards one transport uses; the largest servers have 8 beside their GPUs.
constexpr uint32_t kMaxRails = 8;

// The fixed part of Endpoint::describe; `n_lanes` LaneBlobs follow. Lane i of one end is connected to lane i
// of the other.
struct EndpointBlob {
  uint32_t magic;
  uint16_t version;
  uint8_t n_lanes;
  uint8_t n_rails;  // this end has, those that are down included
  uint32_t nonce;   // the 24 bits from which packets are numbered are the XOR of both ends' nonces
  uint32_t reserved2;
};
static_assert(sizeof(EndpointBlob) == 16);

// One queue pair, waiting to be connected.
struct LaneBlob {
  uint8_t gid[16];
  uint32_t queue_pair;
  uint16_t lid;        // InfiniBand only
  uint8_t mtu;         // as ibv_mtu: 1 is 256 bytes, 5 is 4,096
  uint8_t rail;        // of its owner: which of a region's keys is good here
  uint8_t reads_in;    // RDMA READs it answers at a time
  uint8_t link_layer;  // 1 InfiniBand, 2 Ethernet
  uint16_t reserved;
  uint32_t beacon_key;
  uint64_t beacon;  // address of 8 readable bytes, which mean nothing: to see whether the queue pair is there
};
static_assert(sizeof(LaneBlob) == 40);

// Follows the RegionBlob of a readable region.
struct RegionKeys {
  uint64_t address;
  uint32_t n_rails;
  uint32_t reserved;
  uint32_t keys[kMaxRails];  // by rail of the owner
};
static_assert(sizeof(RegionKeys) == 48);

}  // namespace p2pkv::verbs
