// The active messages of the ucx transport and its half of a handshake. docs/transports.md has the byte
// tables.
#pragma once

#include <cstdint>

#include "net/frames.h"

namespace p2pkv::ucx {

constexpr uint32_t kHelloMagic = 0x48553250;     // "P2UH"
constexpr uint32_t kEndpointMagic = 0x45553250;  // "P2UE"
constexpr uint32_t kRegionMagic = 0x52553250;    // "P2UR"

// Numbers of active messages; they are UCX's addresses within a worker.
enum MessageKind : unsigned {
  kHello = 1,    // reader to owner, the first: a HelloFrame, then the address of the reader's worker
  kAsk = 2,      // reader to owner: an AskFrame, then the spans
  kBytes = 3,    // owner to reader: a BytesFrame, then the bytes
  kEnd = 4,      // owner to reader: an EndFrame, then the words
  kRefused = 5,  // owner to reader, the answer to a hello without a live token, or the owner ends: empty
  kLeave = 6,    // reader to owner, the last: a LeaveFrame
};

// Bounds what an owner keeps of one request to 32 KiB, and makes it one message of one segment.
constexpr uint32_t kMaxSpans = 1024;
// Requests of one reader that an owner has not answered yet; one more and it is hung up on.
constexpr uint32_t kMaxRequests = 8;
// Bounds how much an overwritten page can cost before its reader learns of it, and how long words stay
// unread. A longer span is a request of its own.
constexpr uint64_t kMaxRequestBytes = 1 << 20;

// Endpoint::describe: the token that lets a reader in, and the address of the owner's worker behind it.
struct EndpointBlob {
  uint32_t magic;
  uint16_t version;
  uint16_t address_nbytes;
  uint64_t reserved;
  Token token;
};
static_assert(sizeof(EndpointBlob) == 48);

struct HelloFrame {
  Hello hello;
  uint64_t reader;  // random; stands in everything that either side sends from now on
};
static_assert(sizeof(HelloFrame) == 48);

// `n_spans` SpanRequests are the payload.
struct AskFrame {
  uint64_t reader;
  uint64_t id;
  uint32_t n_spans;
  uint32_t reserved;
};
static_assert(sizeof(AskFrame) == 24);

// The payload is a piece of the request's spans, taken as one string of bytes, from `position` on.
struct BytesFrame {
  uint64_t reader;
  uint64_t id;  // of the request
  uint64_t position;
};
static_assert(sizeof(BytesFrame) == 24);

// Over tcp the end of the connection says as much. Over RDMA nothing does until a keepalive goes unanswered.
struct LeaveFrame {
  uint64_t reader;
};
static_assert(sizeof(LeaveFrame) == 8);

enum class EndStatus : uint32_t { kOk = 0, kRegionGone = 1 };

// Sent when the sends of all bytes have completed. kOk: the payload is an 8-byte word for each span that
// wants one. kRegionGone: no payload, and none of the spans counts.
struct EndFrame {
  uint64_t reader;
  uint64_t id;  // of the request
  uint32_t status;
  uint32_t n_words;
};
static_assert(sizeof(EndFrame) == 24);

}  // namespace p2pkv::ucx
