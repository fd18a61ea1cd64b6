// Where peers that were let in over the control plane open sealed streams, and how they do.
//
// The reader's half of the handshake says that it wants one; the owner's half is where to connect, a token to
// show there once, and the key of the session. docs/wire.md has the byte tables.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/thread.h"
#include "net/doorman.h"
#include "net/frames.h"
#include "net/listener.h"
#include "net/sealed_stream.h"

namespace p2pkv {

// What tells the doors of a node apart.
struct DoorKind {
  uint32_t request_magic;
  uint32_t door_magic;
  uint32_t hello_magic;
  const char* thread_name;
};
// "P2DQ", "P2DD" and "P2DH"; "P2TQ", "P2TD" and "P2TL". A request of the tcp transport begins with "P2TQ"
// too: version 1 of the protocol has it so, and the two are never said at the same place.
constexpr DoorKind kDirectoryDoor{0x51443250, 0x44443250, 0x48443250, "p2pkv-dir-door"};
constexpr DoorKind kLinkDoor{0x51543250, 0x44543250, 0x4c543250, "p2pkv-link-door"};

// The reader's half: that it wants a stream.
struct DoorRequestBlob {
  uint32_t magic;
  uint16_t version;
  uint16_t reserved;
};
static_assert(sizeof(DoorRequestBlob) == 8);

// The owner's half.
struct DoorBlob {
  uint32_t magic;
  uint16_t version;
  uint16_t port;
  uint8_t family;  // 4 or 6
  uint8_t reserved[3];
  uint32_t scope;       // of an IPv6 link-local address, else 0
  uint8_t address[16];  // an IPv4 address takes the first 4
  Token token;
  SessionKey key;
};
static_assert(sizeof(DoorBlob) == 96);

class SealedDoor {
 public:
  // Called on the door's own thread with the stream of a peer that showed its token.
  using Admit = std::function<void(SealedStream stream)>;

  SealedDoor(const DoorKind& kind, Admit admit);
  ~SealedDoor() { close(); }

  // False, with the reason in `error`, if it can't listen there.
  bool start(const ListenAt& at, std::string* error);
  // Takes a reader's half and returns this side's; empty, with the reason in `error`.
  std::string accept(std::string_view remote, std::string* error);
  // Lets nobody in any more, and returns when `admit` has. Idempotent.
  void close();

 private:
  SessionKey key_of(uint64_t grant) const;

  const DoorKind kind_;
  const Admit admit_;
  SessionKey master_key_;
  Address address_;
  ThreadOwner<Doorman> doorman_;
};

// The reader's half for a door of this kind.
std::string ask_for_door(const DoorKind& kind);

// A stream to `door`, the owner's half, that goes out with the token in front; its connection may still be
// under way. Null, with the reason in `error`.
std::unique_ptr<SealedStream> knock(const DoorKind& kind, std::string_view door, std::string* error);

// Sends what is queued and waits for the next frame until `deadline`, when it is kBlocked.
SealedStream::Progress receive_by(SealedStream& stream, const Deadline& deadline);

}  // namespace p2pkv
