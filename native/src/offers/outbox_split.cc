// Offers that are told in parts: how they are cut, and how what nobody asks for ends with what was taken.
#include <utility>

#include "offers/outbox_parts.h"

namespace p2pkv::offers {

// Parts of consecutive rows, of as many as a message may have, that lie on one device or in host memory.
// None, with the reason in `error`, if a row is larger than all of the staging.
std::vector<std::shared_ptr<Outbox::Outgoing>> Outbox::split(const Rows& rows, PlacedRows placed,
                                                             const Deadline& lease, std::string* error) {
  std::vector<std::shared_ptr<Outgoing>> parts;
  const auto staging = placed.lie_on_devices() ? staging_of_devices() : nullptr;
  if (!staging && placed.rows.size() <= Transfers::kMaxRows) {
    parts.push_back(
        std::make_shared<Outgoing>(shared_from_this(), rows, rows.first_row, std::move(placed), lease));
    return parts;
  }
  const auto point = staging ? StreamPoint::mark(rows.stream, placed) : nullptr;
  PlacedRows part;
  uint64_t nbytes = 0;
  const auto finish = [&](size_t end) {
    const auto first_row = rows.first_row + static_cast<uint32_t>(end - part.rows.size());
    parts.push_back(std::make_shared<Outgoing>(shared_from_this(), rows, first_row, std::exchange(part, {}),
                                               lease, point));
    nbytes = 0;
  };
  for (size_t i = 0; i < placed.rows.size(); ++i) {
    const PlacedRows::Row& row = placed.rows[i];
    const auto& device = placed.device_of(row);
    const uint64_t padded = StagingArea::padded(row.length);
    if (staging && device && padded > staging->largest()) {
      *error = "row " + std::to_string(i) + " has " + std::to_string(row.length) +
               " bytes of device memory, and the staging has room for " + std::to_string(staging->largest()) +
               " of one row";
      return {};
    }
    const bool is_another = !part.rows.empty() && part.device_of(part.rows.front()) != device;
    const bool is_full = staging && device && !part.rows.empty() && nbytes + padded > staging->piece_nbytes();
    if (is_another || is_full || part.rows.size() == Transfers::kMaxRows) finish(i);
    part.append(placed.memories[row.memory], row.offset, row.length);
    nbytes += padded;
  }
  finish(placed.rows.size());
  // Parts that are staged of devices are given up one by one: `stow` copies those that nobody has taken.
  if (parts.size() == 1 || staging) return parts;
  const auto all = std::make_shared<const std::vector<std::weak_ptr<Outgoing>>>(parts.begin(), parts.end());
  for (const auto& one : parts) one->parts = all;
  return parts;
}

// A get finishes the offer that it took rows of: the parts that neither it nor anybody else still asks for.
// It has asked for all that it wants before it took the first (Inbox::get).
void Outbox::end_rest(const Outgoing& taken, std::vector<Post>* posts) {
  if (!taken.parts || taken.to != 0) return;
  for (const auto& one : *taken.parts) {
    const auto part = one.lock();
    if (part && !part->is_done && !is_asked_for(*part)) end(*part, RowStatus::kOutOfRange, posts);
  }
}

}  // namespace p2pkv::offers
