// The handshake of a directory channel. docs/wire.md has the byte tables.
#pragma once

#include <cstdint>

#include "net/frames.h"
#include "net/sealed_stream.h"

namespace p2pkv {

constexpr uint32_t kDirectoryHelloMagic = 0x48443250;    // "P2DH"
constexpr uint32_t kDirectoryRequestMagic = 0x51443250;  // "P2DQ"
constexpr uint32_t kDirectoryDoorMagic = 0x44443250;     // "P2DD"

// The reader's half: that it wants a channel.
struct DirectoryRequestBlob {
  uint32_t magic;
  uint16_t version;
  uint16_t reserved;
};
static_assert(sizeof(DirectoryRequestBlob) == 8);

// The owner's half: where to connect, what to show there once, and the key of the session.
struct DirectoryDoorBlob {
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
static_assert(sizeof(DirectoryDoorBlob) == 96);

}  // namespace p2pkv
