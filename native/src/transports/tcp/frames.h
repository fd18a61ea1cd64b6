// The frames of the tcp transport and its half of a handshake.
#pragma once

#include <cstdint>

#include "net/frames.h"

namespace p2pkv::tcp {

constexpr uint32_t kHelloMagic = 0x48543250;     // "P2TH"
constexpr uint32_t kEndpointMagic = 0x45543250;  // "P2TE"
constexpr uint32_t kSealedMagic = 0x53543250;    // "P2TS": the same, of an end that encrypts
constexpr uint32_t kRegionMagic = 0x52543250;    // "P2TR"
constexpr uint32_t kRequestMagic = 0x51543250;   // "P2TQ"
constexpr uint32_t kChunkMagic = 0x43543250;     // "P2TC"

constexpr uint32_t kMaxStreams = 8;
constexpr uint32_t kMaxAddresses = 8;
// Bounds what a server allocates for one request to 256 KiB.
constexpr uint32_t kMaxSpans = 8192;
// Bounds how much an overwritten page can cost before its reader learns of it, and how long words stay
// unread.
constexpr uint64_t kMaxChunkBytes = 4 << 20;

// The fixed part of Endpoint::describe; `n_tokens` tokens follow, one for each connection the reader may
// make, and behind them the owner's further addresses. Of an end that encrypts, a CipherKey comes last.
struct EndpointBlob {
  uint32_t magic;
  uint16_t version;
  uint16_t port;
  uint8_t family;     // 4 or 6
  uint8_t n_streams;  // how many connections this end would make
  uint8_t n_tokens;
  uint8_t more;         // how many AddressBlobs follow; kTakesMore: this end understands them
  uint32_t scope;       // of an IPv6 link-local address, else 0
  uint8_t address[16];  // an IPv4 address takes the first 4
};
static_assert(sizeof(EndpointBlob) == 32);

constexpr uint8_t kTakesMore = 0x80;

struct AddressBlob {
  uint16_t port;
  uint8_t family;  // 4 or 6
  uint8_t reserved;
  uint32_t scope;
  uint8_t address[16];
};
static_assert(sizeof(AddressBlob) == 24);

// Reader to owner; `n_spans` SpanRequests follow.
struct RequestHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t flags;  // 0
  uint64_t id;
  uint32_t n_spans;
  uint32_t reserved;
};
static_assert(sizeof(RequestHeader) == 24);

enum class ChunkStatus : uint32_t { kOk = 0, kRegionGone = 1 };

// Owner to reader: a piece of the answer, in the order of the spans. kOk: `nbytes` bytes follow, then a
// ChunkTrailer. kRegionGone: nothing follows, and `n_ended` spans won't be answered.
struct ChunkHeader {
  uint32_t magic;
  uint32_t status;
  uint64_t id;       // of the request
  uint32_t n_ended;  // spans whose last byte is in this chunk
  uint32_t reserved;
  uint64_t nbytes;
};
static_assert(sizeof(ChunkHeader) == 32);

// One 8-byte word follows for each ended span that wants one. If the region is gone the words are zeros and
// none of the ended spans counts, since their bytes may be filler.
struct ChunkTrailer {
  uint32_t status;
  uint32_t n_words;
};
static_assert(sizeof(ChunkTrailer) == 8);

}  // namespace p2pkv::tcp
