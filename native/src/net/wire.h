// The binary frames that native threads answer (docs/wire.md has the byte tables; p2pkv/control/wire.py is
// the other side).
//
// Everything is little-endian, as on every machine p2pkv builds for (asserted below).
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "page/location.h"

namespace p2pkv::wire {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

constexpr uint32_t kMagic = 0x766b3270;  // "p2kv"
constexpr uint16_t kVersion = 1;
constexpr uint32_t kMaxEntries = 8192;  // a frame; larger batches are split by the client

enum class Kind : uint16_t {
  kProbe = 1,
  kGet = 2,
  kPut = 3,
  kDrop = 4,
  kConnect = 5,
  kExchange = 6,
  kPromote = 7,
  kRelease = 8,  // over channels only; not answered
  kCounters = 9,
  kGossip = 10,
  kCheck = 11,
  kEpochs = 12,
  kLocate = 13,  // as kGet; the locations of the answer come by columns
  kFollow = 14,
  kTakeBack = 15,
  kHandOver = 16,
  kExplain = 17,   // handed to Python, as counters are
  kTakeOver = 18,  // this and the next two: likewise
  kLetGo = 19,
  kDrain = 20,
  kRouters = 21,
  kTouch = 22,      // over channels only
  kHeld = 23,       // as kLocate, of what the asked node itself has
  kReply = 0x8000,  // set in the kind of every reply
};

enum class ReplyStatus : uint32_t {
  kOk = 0,
  kVersion = 1,    // the body is empty; the header's version is the answering node's
  kWrongBoot = 2,  // meant for an earlier boot of this node; the header's boot is the current one
  kMalformed = 3,
  kRefused = 4,  // the body is a sentence saying why
  kFull = 5,     // the shard holds as many entries as it may
};

struct Header {
  uint32_t magic;
  uint16_t version;
  uint16_t kind;
  uint64_t request_id;
  uint64_t boot;  // request: the boot epoch it is meant for, 0 for any; reply: that of the answering node
  uint32_t count;
  uint32_t status;
};
static_assert(sizeof(Header) == 32);

struct ProbeReply {
  uint64_t node_key;
  uint64_t digest;
};

struct PutEntry {
  Key key;
  uint64_t sequence;
  Location location;
};
static_assert(sizeof(PutEntry) == 88);

// Deletes an entry if it is the one named; `sequence` 0 from readers, who found it stale.
struct DropEntry {
  Key key;
  uint64_t sequence;
  uint64_t owner;
  uint64_t boot;
  uint64_t generation;
};
static_assert(sizeof(DropEntry) == 48);
// In an owner's own DROP: of whatever generation, since the sequence was drawn before the page was looked
// for. Odd, so no page has it. Mirrors ANY_GENERATION in p2pkv/page.py.
constexpr uint64_t kAnyGeneration = ~uint64_t{0};

// Asks whether a shard has this entry, as `mark_of` its location says.
struct CheckEntry {
  Key key;
  uint64_t mark;
};
static_assert(sizeof(CheckEntry) == 24);

// Asks the owner of a page that lies on its disk to bring it back into its pool. The times count from the
// arrival of the request; times and lease of its first entry hold for all.
struct PromoteEntry {
  Key key;
  uint32_t answer_ms;  // by then it must be answered; 0: at once, with what is in the pool
  uint32_t lease_ms;   // for so long what was promoted is to stay, unless the lease is released before
  uint64_t lease;      // the reader's, drawn at random; 0: none to be released
};
static_assert(sizeof(PromoteEntry) == 32);

inline Header make_reply(const Header& request, ReplyStatus status, uint64_t boot, uint32_t count) {
  return {kMagic,
          kVersion,
          static_cast<uint16_t>(request.kind | static_cast<uint16_t>(Kind::kReply)),
          request.request_id,
          boot,
          count,
          static_cast<uint32_t>(status)};
}

// Reads fields off the front of a message; every accessor answers nothing once the message is too short.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  template <typename T>
  std::optional<T> value() {
    if (rest_.size() < sizeof(T)) return std::nullopt;
    T out;
    std::memcpy(&out, rest_.data(), sizeof(T));
    rest_.remove_prefix(sizeof(T));
    return out;
  }

  std::optional<std::string_view> bytes(size_t nbytes) {
    if (rest_.size() < nbytes) return std::nullopt;
    const std::string_view out = rest_.substr(0, nbytes);
    rest_.remove_prefix(nbytes);
    return out;
  }

  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
};

// Takes the records of a body into memory of their own: received bytes need not be aligned for the structs
// in them. False if they are too many, or not so many.
template <typename T>
bool take_records(const Reader& body, uint32_t count, std::vector<T>* records) {
  if (count > kMaxEntries || body.rest().size() != count * sizeof(T)) return false;
  records->resize(count);
  if (count > 0) std::memcpy(static_cast<void*>(records->data()), body.rest().data(), count * sizeof(T));
  return true;
}

template <typename T>
void append(std::string& out, const T& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

}  // namespace p2pkv::wire
