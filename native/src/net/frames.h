// What several transports put on sockets and into handshakes. docs/transports.md has the byte tables.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "net/tokens.h"

namespace p2pkv {

static_assert(std::endian::native == std::endian::little, "frames are little-endian and copied as they are");

constexpr uint16_t kFrameVersion = 1;

// The first bytes on every connection.
struct Hello {
  uint32_t magic;
  uint16_t version;
  uint16_t reserved;
  Token token;
};
static_assert(sizeof(Hello) == 40);

// What a peer hands to Endpoint::attach.
struct RegionBlob {
  uint32_t magic;
  uint16_t version;
  uint16_t reserved;
  uint32_t region;
  uint32_t reserved2;
  uint64_t nbytes;
};
static_assert(sizeof(RegionBlob) == 24);

// What a reader asks its owner for, where the owner sends the bytes: a span, and with it the word that proves
// it.
struct SpanRequest {
  uint32_t region;
  uint32_t want_word;  // 0 or 1
  uint64_t offset;
  uint64_t length;
  uint64_t word_offset;
};
static_assert(sizeof(SpanRequest) == 32);

template <typename T>
std::string to_blob(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

// The start of `blob` as a T; false, with the reason in `error`, if it is too short or not a T of this
// version.
template <typename T>
bool from_blob(std::string_view blob, uint32_t magic, T* value, std::string* error) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (blob.size() < sizeof(T)) {
    *error = "handshake of " + std::to_string(blob.size()) + " bytes is too short, " +
             std::to_string(sizeof(T)) + " are needed";
    return false;
  }
  std::memcpy(value, blob.data(), sizeof(T));
  if (value->magic != magic) {
    *error = "handshake is not one of this transport";
    return false;
  }
  if (value->version != kFrameVersion) {
    *error = "handshake has version " + std::to_string(value->version) + ", this node speaks version " +
             std::to_string(kFrameVersion);
    return false;
  }
  return true;
}

}  // namespace p2pkv
