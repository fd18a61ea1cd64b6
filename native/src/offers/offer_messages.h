// What comes over a link, taken apart. A member with a bug, or worse, may send anything: what these functions
// give has lengths, sums and counts within bounds, and is nothing at all for what no node of ours would send.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "offers/offer_frames.h"

namespace p2pkv::offers {

// A row's place in a block that holds several begins at a multiple of this: for the copies of the processor.
constexpr uint64_t kRowAlignment = 64;

struct OfferMessage {
  OfferRecord record;
  std::string name;
  std::vector<RowRecord> rows;  // none is empty, and none ends beyond what an int64_t can say
  uint64_t padded_nbytes;       // of all rows, each padded to the alignment
};

struct AskMessage {
  AskRecord record;
  std::string name;
};

struct PulledMessage {
  PulledRecord record;
  RowStatuses statuses;
};

// Over what a memory can be read.
struct WayMessage {
  std::string name;
  std::string domain;
  std::string region;
};

std::optional<OfferMessage> take_offer(wire::Reader& body);
std::optional<AskMessage> take_ask(wire::Reader& body);
std::optional<PulledMessage> take_pulled(wire::Reader& body);
std::optional<GoneRecord> take_gone(wire::Reader& body);
std::optional<std::vector<WayMessage>> take_ways(wire::Reader body);
// Ways by name and domain alone.
std::optional<std::vector<WayMessage>> take_direct(wire::Reader body);

// The end of so many milliseconds that a peer named; of no more than any call of ours may take.
Deadline after_ms(uint32_t ms);

}  // namespace p2pkv::offers
