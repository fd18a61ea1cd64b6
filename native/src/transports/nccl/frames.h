// What the two ends of the nccl transport say to each other, over a sealed stream beside NCCL's own
// connections, and its half of a handshake. docs/transports.md has the byte tables.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "net/frames.h"
#include "net/sealed_door.h"
#include "transports/nccl/api.h"

namespace p2pkv::nccl {

constexpr uint32_t kEndpointMagic = 0x454e3250;  // "P2NE"
constexpr uint32_t kRegionMagic = 0x524e3250;    // "P2NR"
// "P2NQ", "P2ND" and "P2NH".
constexpr DoorKind kDoor{0x514e3250, 0x444e3250, 0x484e3250, "p2pkv-nccl-door"};

// Bounds what is read at a time, and so how much an overwritten page can cost. A longer span is read in
// several requests, each of which wants its word.
constexpr uint64_t kMaxRequestBytes = 1 << 20;
// NCCL makes a work item of each.
constexpr uint32_t kMaxSpans = 128;
// Requests of one reader that an owner has not answered yet; one more and it is hung up on.
constexpr uint32_t kMaxRequests = 4;

// Which life of which process an end belongs to. Random.
using Instance = std::array<uint8_t, 16>;

// Endpoint::describe.
struct EndpointBlob {
  uint32_t magic;
  uint16_t version;
  uint16_t reserved;
  Instance instance;
  DoorBlob door;
};
static_assert(sizeof(EndpointBlob) == 120);

enum MessageKind : uint32_t {
  kWelcome = 1,  // owner to reader, the first: a WelcomeFrame
  kAsk = 2,      // reader to owner: an AskFrame, then the spans
  kGo = 3,       // owner to reader: a GoFrame; the bytes of the request are what NCCL brings next
  kVerdict = 4,  // owner to reader: a VerdictFrame, then the words
};

struct WelcomeFrame {
  uint32_t kind;
  uint32_t reserved;
  UniqueId id;  // of the communicator, in which the owner is rank 0 and the reader rank 1
};
static_assert(sizeof(WelcomeFrame) == 136);

// `n_spans` SpanRequests follow.
struct AskFrame {
  uint32_t kind;
  uint32_t n_spans;
  uint64_t id;
};
static_assert(sizeof(AskFrame) == 16);

struct GoFrame {
  uint32_t kind;
  uint32_t reserved;
  uint64_t id;  // of the request
};
static_assert(sizeof(GoFrame) == 16);

enum class VerdictStatus : uint32_t { kOk = 0, kRegionGone = 1 };

// Sent when the send of the request's bytes has ended on its stream. kOk: an 8-byte word follows for each
// span that wants one. kRegionGone: none of the spans counts.
struct VerdictFrame {
  uint32_t kind;
  uint32_t status;
  uint64_t id;  // of the request
  uint32_t n_words;
  uint32_t reserved;
};
static_assert(sizeof(VerdictFrame) == 24);

// What a message is; 0 if it is too short to be any.
inline uint32_t kind_of(std::string_view message) {
  uint32_t kind = 0;
  if (message.size() >= sizeof kind) std::memcpy(&kind, message.data(), sizeof kind);
  return kind;
}

// The frame at the front of a message. False if it is shorter.
template <typename Frame>
bool take_frame(std::string_view message, Frame* frame, std::string_view* rest) {
  if (message.size() < sizeof(Frame)) return false;
  std::memcpy(frame, message.data(), sizeof(Frame));
  *rest = message.substr(sizeof(Frame));
  return true;
}

template <typename Frame>
std::string_view bytes_of(const Frame& frame) {
  return {reinterpret_cast<const char*>(&frame), sizeof frame};
}

}  // namespace p2pkv::nccl
