#include "offers/offer_messages.h"

#include <algorithm>

#include "base/checked.h"

namespace p2pkv::offers {
namespace {

// As in p2pkv/offers/transfers.py, MAX_SECONDS.
constexpr double kMaxSeconds = 3600.0;
// Of one memory. Its ways are copied into every read, so their number and size are bounded.
constexpr size_t kMaxWays = 16;
constexpr size_t kMaxText = 64 << 10;

bool are_numbered(uint32_t first_row, uint32_t n_rows) {
  return n_rows > 0 && n_rows <= Transfers::kMaxRows && first_row <= UINT32_MAX - n_rows;
}

std::optional<std::string> take_name(wire::Reader& body, uint32_t size) {
  if (size == 0 || size > Transfers::kMaxRequestName) return std::nullopt;
  const auto name = body.bytes(size);
  return name ? std::optional(std::string(*name)) : std::nullopt;
}

// Spans are counted with signs, from here on to the transports.
bool is_countable(std::optional<uint64_t> end) {
  return end && *end <= static_cast<uint64_t>(INT64_MAX);
}

// The bytes that the rows take one behind the other.
std::optional<uint64_t> measure(const std::vector<RowRecord>& rows) {
  uint64_t total = 0;
  for (const RowRecord& row : rows) {
    const auto padded = checked_padded(row.length, kRowAlignment);
    const auto sum = padded ? checked_sum(total, *padded) : std::nullopt;
    if (row.length == 0 || !is_countable(checked_sum(row.offset, row.length)) || !is_countable(sum))
      return std::nullopt;
    total = *sum;
  }
  return total;
}

std::optional<std::vector<WayMessage>> take_some_ways(wire::Reader& body, bool has_regions) {
  const auto n = body.value<uint32_t>();
  if (!n) return std::nullopt;
  std::vector<WayMessage> ways;
  // A later version may know more of them.
  for (uint32_t i = 0; i < std::min<uint32_t>(*n, kMaxWays); ++i) {
    auto name = take_text(body, kMaxText);
    auto domain = name ? take_text(body, kMaxText) : std::nullopt;
    auto region = domain && has_regions ? take_text(body, kMaxText) : std::optional<std::string>("");
    if (!domain || !region) return std::nullopt;
    ways.push_back({std::move(*name), std::move(*domain), std::move(*region)});
  }
  return ways;
}

}  // namespace

std::optional<OfferMessage> take_offer(wire::Reader& body) {
  const auto record = body.value<OfferRecord>();
  if (!record || !are_numbered(record->first_row, record->n_rows)) return std::nullopt;
  auto name = take_name(body, record->name_size);
  auto rows = name ? take_all<RowRecord>(body, record->n_rows) : std::nullopt;
  const auto nbytes = rows ? measure(*rows) : std::nullopt;
  if (!nbytes) return std::nullopt;
  return OfferMessage{*record, std::move(*name), std::move(*rows), *nbytes};
}

std::optional<AskMessage> take_ask(wire::Reader& body) {
  const auto record = body.value<AskRecord>();
  if (!record || !are_numbered(record->first_row, record->n_rows)) return std::nullopt;
  auto name = take_name(body, record->name_size);
  if (!name) return std::nullopt;
  return AskMessage{*record, std::move(*name)};
}

std::optional<PulledMessage> take_pulled(wire::Reader& body) {
  const auto record = body.value<PulledRecord>();
  if (!record || record->n_rows > Transfers::kMaxRows) return std::nullopt;
  auto statuses = take_all<RowStatus>(body, record->n_rows);
  if (!statuses) return std::nullopt;
  return PulledMessage{*record, std::move(*statuses)};
}

std::optional<GoneRecord> take_gone(wire::Reader& body) {
  const auto record = body.value<GoneRecord>();
  if (!record || !are_numbered(record->first_row, record->n_rows)) return std::nullopt;
  return record;
}

std::optional<std::vector<WayMessage>> take_ways(wire::Reader body) {
  return take_some_ways(body, true);
}

std::optional<std::vector<WayMessage>> take_direct(wire::Reader body) {
  return take_some_ways(body, false);
}

Deadline after_ms(uint32_t ms) {
  return Deadline::after(std::min(ms / 1e3, kMaxSeconds));
}

}  // namespace p2pkv::offers
