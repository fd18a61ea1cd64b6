// The packets of the cuda_ipc transport's Unix socket (SOCK_SEQPACKET) and its half of a handshake.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/sharing.h"
#include "net/frames.h"
#include "transports/region_endpoint.h"

namespace p2pkv::cuda_ipc {

constexpr uint32_t kHelloMagic = 0x48473250;     // "P2GH"
constexpr uint32_t kEndpointMagic = 0x45473250;  // "P2GE"
constexpr uint32_t kRegionMagic = 0x52473250;    // "P2GR"
constexpr uint32_t kRequestMagic = 0x51473250;   // "P2GQ"
constexpr uint32_t kReplyMagic = 0x41473250;     // "P2GA"
constexpr uint32_t kWordsMagic = 0x57473250;     // "P2GW"

// What an shm transport describes of itself.
constexpr size_t kHostHalfBytes = 80;

// Endpoint::describe: where device memory is asked for, and the shm transport's half for host memory.
struct EndpointBlob {
  uint32_t magic;
  uint16_t version;
  uint16_t reserved;
  std::array<char, kHostHalfBytes> host;
  OwnerDoor door;
};
static_assert(sizeof(EndpointBlob) == 160);

enum class ShareStatus : uint32_t { kGranted = 0, kNoSuchRegion = 1 };

// Owner to reader, in the order of its RegionRequests. A descriptor comes along where `range` asks for one.
struct ShareReply {
  uint32_t magic;
  uint32_t status;
  uint32_t region;
  uint32_t has_words;  // 0 or 1: a WordsPacket follows
  uint64_t nbytes;
  cuda::SharedRange range;
};
static_assert(sizeof(ShareReply) == 112);

// Brings the sealed memfd that holds the region's words: a word's offset is one in there.
struct WordsPacket {
  uint32_t magic;
  uint32_t region;
  uint64_t nbytes;
};
static_assert(sizeof(WordsPacket) == 16);

}  // namespace p2pkv::cuda_ipc
