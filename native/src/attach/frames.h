// What an engine and its host's node say to each other: packets of a Unix socket (SOCK_SEQPACKET), and the
// memory that each of them writes and the other maps read-only. docs/attach.md has it byte by byte.
//
// Both are of one machine, so numbers are in its own byte order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "page/location.h"

namespace p2pkv::attaching {

constexpr uint16_t kVersion = 4;
constexpr uint32_t kHelloMagic = 0x48413250;    // "P2AH"
constexpr uint32_t kWelcomeMagic = 0x57413250;  // "P2AW"
constexpr uint32_t kPoolMagic = 0x50413250;     // "P2AP"
constexpr uint32_t kMemoryMagic = 0x4d413250;   // "P2AM"
constexpr uint32_t kReplyMagic = 0x52413250;    // "P2AR"
constexpr uint32_t kCallMagic = 0x43413250;     // "P2AC"

// One request has at most so many; larger batches take several.
constexpr size_t kMaxPages = 4096;
constexpr size_t kMaxPieces = 65536;
constexpr size_t kAddressBytes = 264;
constexpr size_t kClusterBytes = 136;
// A node lets in so many, and so many lines of one engine at once.
constexpr size_t kMostEngines = 64;
constexpr size_t kMostLines = 8;

// It says what a connection is for. An engine has one by which it is attached, and one for each *line*: a
// place for one request at a time. A visitor wants to know which node this is, and no more: nothing comes
// with his Welcome, which has no number.
enum class Purpose : uint16_t { kEngine = 1, kLine = 2, kVisit = 3 };

// First packet of a connection. A line names its engine by what its Welcome said, and brings the memfd of its
// RequestArea along. An engine says in `engine` what it calls itself, life after life, or 0: it finds the
// share of the pool by it that it left.
struct Hello {
  uint32_t magic;
  uint16_t version;
  uint16_t purpose;
  uint64_t engine;
  uint64_t secret;
};
static_assert(sizeof(Hello) == 24);

enum class Refusal : uint16_t {
  kNone = 0,
  kVersion = 1,        // Welcome::version says which one the node speaks
  kTooMany = 2,        // engines, or lines of this engine
  kUnknownEngine = 3,  // a line's
  kBadMemory = 4,      // a line's area is not sealed, or of another size
};

// The node's answer. Unless it refuses, a memfd comes along: to an engine that of the HostArea, to a line
// that of its AnswerArea.
struct Welcome {
  uint32_t magic;
  uint16_t version;
  uint16_t refusal;
  uint64_t engine;
  uint64_t secret;
  uint64_t node_key;
  char address[kAddressBytes];  // of the node's control socket, padded with zeros
  char cluster[kClusterBytes];  // the name of the node's cluster, padded with zeros
};
static_assert(sizeof(Welcome) == 32 + kAddressBytes + kClusterBytes);

// What the node's pool consists of, which an engine maps read-only (pool/mapped_pool.h).
enum class PoolPart : uint32_t { kIndex = 0, kRecords = 1, kRegion = 2 };
constexpr uint32_t kPoolParts = 3;

// Node to engine, after the Welcome, for each part in this order: its memfd comes along. Numbers in it are
// laid out as this version has them.
struct ShownPart {
  uint32_t magic;
  uint32_t part;
};
static_assert(sizeof(ShownPart) == 8);

enum class MemoryChange : uint32_t { kAdd = 1, kForget = 2 };

// Engine to node: this memory, whose memfd comes along, may be read from now on, or is to be forgotten.
struct MemoryRequest {
  uint32_t magic;
  uint32_t change;
  uint32_t memory;  // its number, which the engine chooses
  uint32_t reserved;
  uint64_t nbytes;
};
static_assert(sizeof(MemoryRequest) == 24);

enum class MemoryStatus : uint32_t {
  kTaken = 0,
  kNotSealed = 1,  // it could be made shorter, which would end the node
  kOtherSize = 2,
  kHugePages = 3,  // a hole in it could not be filled, which would end the node
  kTooMany = 4,
  kNotMapped = 5,
};

struct MemoryReply {
  uint32_t magic;
  uint32_t memory;
  uint32_t status;
  uint32_t reserved;
};
static_assert(sizeof(MemoryReply) == 16);

// On a line, both ways, to wake who sleeps: a request is written or about to be, or is answered or about to
// be. What counts is `RequestArea::id` and `AnswerArea::answered`.
struct Call {
  uint32_t magic;
  uint32_t reserved;
  uint64_t id;
};
static_assert(sizeof(Call) == 16);

// kMissed: some owner of these pages' entries did not take what the engine told it. kPublishAgain: what lies
// in the pool of these is published, as if its bytes had come again; of the others nothing is. kConfirm: the
// same of what the engine has published already in the same call of its user, which is no further use.
// kFinds: the engine's calls find these pages so often, wherever they lie; what it said before counts no
// more.
enum class RequestKind : uint32_t {
  kPublish = 1,
  kLookUp = 2,
  kMissed = 3,
  kPublishAgain = 4,
  kConfirm = 5,
  kFinds = 6
};

// A stretch of an engine's memory.
struct MemoryPiece {
  uint32_t memory;
  uint32_t reserved;
  uint64_t offset;
  uint64_t nbytes;
};
static_assert(sizeof(MemoryPiece) == 24);

// How often an engine's calls find a page.
struct Finds {
  uint64_t in_1000_s;
  uint32_t n_looks;  // that this is known from (cache/hot_pages.h)
  uint32_t reserved;
};
static_assert(sizeof(Finds) == 16);

// Written by the engine alone. `withdrawn` is the highest number of a request that it has taken back, `id`
// that of the one that is written, which stays so until the next. `is_awake`, unless it is 0: it sees an
// answer by itself (waiting.h has the values).
struct RequestArea {
  uint64_t withdrawn;
  uint64_t id;
  uint32_t kind;
  uint32_t n_pages;
  uint32_t n_pieces;  // of each page
  uint32_t reserved;
  int64_t timeout_ns;
  uint64_t is_awake;
  uint64_t reserved2[2];
  Key keys[kMaxPages];
  union {
    MemoryPiece pieces[kMaxPieces];
    Finds finds[kMaxPages];  // of kFinds
  };
};
static_assert(offsetof(RequestArea, keys) == 64);

// Written by the node alone. `committing` is the highest number of a request whose bytes it has copied and
// does not look at any more, `answered` that of the last request whose answer is written. `is_awake`, unless
// it is 0: it sees a request by itself.
struct AnswerArea {
  uint64_t committing;
  uint64_t sequence;  // of the directory entries (directory/ask_batch.h)
  uint32_t n_pages;
  uint32_t is_draining;  // the node is about to leave, and stores nothing
  uint64_t answered;
  uint64_t is_awake;
  uint64_t reserved[3];
  uint8_t statuses[kMaxPages];  // PoolStatus
  uint8_t is_found[kMaxPages];  // can be read now, at its location
  uint8_t is_told[kMaxPages];   // the node's own shard of the directory has its entry, and is one to have it
  Location locations[kMaxPages];
};
static_assert(offsetof(AnswerArea, statuses) == 64);

// Written by the node alone, for all its engines.
struct HostArea {
  uint64_t epochs_version;  // NamespaceEpochs::version
  int64_t believed_until;   // as time of `boot_now_ns`: no bump that is over by then is unknown to the node
  uint64_t most_requests;   // of one engine that it serves at once
  int64_t guests_believed_until;  // likewise: no guest lies there that its source has taken back by then
  uint64_t takes_finds;           // 1: it brings what engines find often into its pool
};

constexpr size_t kAreaAlignment = 4096;
template <typename Area>
constexpr size_t area_nbytes() {
  return (sizeof(Area) + kAreaAlignment - 1) / kAreaAlignment * kAreaAlignment;
}

// The words are stored and loaded in one order that both processes agree on: who has stored his own and does
// not see the other's is seen by the other.
inline uint64_t load_word_of(const uint64_t& word) {
  return __atomic_load_n(&word, __ATOMIC_SEQ_CST);
}
inline void store_word_of(uint64_t& word, uint64_t value) {
  __atomic_store_n(&word, value, __ATOMIC_SEQ_CST);
}

}  // namespace p2pkv::attaching
