// What two nodes tell each other about offers, over a link. docs/wire.md has the byte tables.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "net/frames.h"
#include "net/sealed_stream.h"
#include "net/wire.h"
#include "offers/transfers.h"

namespace p2pkv::offers {

// The kinds of messages of a link, in the header's kind; a link knows no others.
enum class Kind : uint16_t {
  kIntroduce = 0x40,  // who opened this link; answered empty
  kReach = 0x41,      // over what can this memory be read? Answered with ways
  kJoin = 0x42,       // a transport's half of a handshake; answered with the other half
  kOffer = 0x43,      // rows to pull
  kAsk = 0x44,        // rows of a request are wanted, for a while
  kAskEnd = 0x45,     // and now no more
  kPulled = 0x46,     // what became of pulling an offer
  kSettled = 0x47,    // whether it was valid all the time
  kWithdrawn = 0x48,  // an offer is not valid any more
  kGone = 0x49,       // rows that are asked for were offered, and are no more
  kDirect = 0x4a,     // the ways over which this node reads devices' memory into its own devices'
  kStage = 0x4b,      // rows that lie on a device are wanted in host memory
};

struct IntroduceRecord {
  uint64_t node_key;
  uint64_t boot;
};
static_assert(sizeof(IntroduceRecord) == 16);

// Followed by the request's name, then by a RowRecord a row.
struct OfferRecord {
  uint64_t offer;
  uint64_t ask;       // that it answers; 0: it is put
  uint32_t lease_ms;  // from the arrival on
  uint32_t first_row;
  uint32_t n_rows;
  uint32_t name_size;
};
static_assert(sizeof(OfferRecord) == 32);

// Of RowRecord::flags: it lies in device memory. Only who has said that it reads that is told of such a row.
constexpr uint32_t kOnDevice = 1;

struct RowRecord {
  uint32_t source;  // a registered memory of the producer
  uint32_t flags;
  uint64_t offset;
  uint64_t length;
};
static_assert(sizeof(RowRecord) == 24);

// Followed by the request's name.
struct AskRecord {
  uint64_t ask;
  uint32_t timeout_ms;
  uint32_t first_row;
  uint32_t n_rows;
  uint32_t name_size;
};
static_assert(sizeof(AskRecord) == 24);

// Followed by a RowStatus a row.
struct PulledRecord {
  uint64_t offer;
  uint32_t n_rows;
  uint32_t reserved;
};
static_assert(sizeof(PulledRecord) == 16);

struct SettledRecord {
  uint64_t offer;
  uint32_t is_valid;
  uint32_t reserved;
};
static_assert(sizeof(SettledRecord) == 16);

// Consecutive rows that an ask waits for in vain.
struct GoneRecord {
  uint64_t ask;
  uint32_t first_row;
  uint32_t n_rows;
};
static_assert(sizeof(GoneRecord) == 16);

// Milliseconds until `deadline`, rounded up.
inline uint32_t left_ms(const Deadline& deadline) {
  return static_cast<uint32_t>(deadline.poll_ms());
}

inline void append_text(std::string& out, std::string_view text) {
  wire::append(out, static_cast<uint32_t>(text.size()));
  out.append(text);
}

template <typename T>
void append_all(std::string& out, const std::vector<T>& values) {
  out.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// The next `n` values, in memory of their own: received bytes need not be aligned.
template <typename T>
std::optional<std::vector<T>> take_all(wire::Reader& body, size_t n) {
  const auto bytes = body.bytes(n * sizeof(T));
  if (!bytes) return std::nullopt;
  std::vector<T> values(n);
  if (n > 0) std::memcpy(static_cast<void*>(values.data()), bytes->data(), bytes->size());
  return values;
}

inline std::optional<std::string> take_text(wire::Reader& body, size_t most) {
  const auto size = body.value<uint32_t>();
  if (!size || *size > most) return std::nullopt;
  const auto text = body.bytes(*size);
  return text ? std::optional(std::string(*text)) : std::nullopt;
}

}  // namespace p2pkv::offers
