// Rows that came before their grant did: copied from the receive buffers by whoever looks after the grant, in
// pieces, so that a call ends by its deadline and the next one goes on where it stopped.
#include <algorithm>

#include "base/copy.h"
#include "offers/inbox_parts.h"

namespace p2pkv::offers {
namespace {

// Between two looks at the time, and at whether somebody waits for the end of it: less than a millisecond.
constexpr uint64_t kHostPiece = 1 << 20;
// As what is pulled for devices: each copy waits for the device once.
constexpr uint64_t kDevicePiece = 8 << 20;

struct Piece {
  std::shared_ptr<Block> block;  // stays, whatever becomes of the offer
  uint64_t from;                 // in the block
  const PlacedRows::Row* to;
  uint64_t offset;  // in the row
  uint64_t nbytes;
};

}  // namespace

// `waits`: for the streams of devices; else rows whose stream is not done are left for another call.
void Inbox::take_stored(Granted& grant, const Deadline& until, bool waits) {
  std::unique_lock lock(mutex_);
  if (grant.is_copying) return;  // that call takes what has come meanwhile as well
  grant.is_copying = true;
  const Deadline first = until.at() < grant.deadline.at() ? until : grant.deadline;
  bool goes_on = true;
  while (goes_on && grant.request) {
    if (std::exchange(grant.has_news, false)) claim_stored(grant);
    if (grant.to_copy.empty() || first.passed()) break;
    goes_on = copy_stored(grant, waits ? first : Deadline::after(0), lock);
  }
  grant.is_copying = false;
  grant.has_news = !grant.to_copy.empty();
  grant.changed.notify_all();
}

// Says which stored rows go to which of the grant: no offer that comes later may bring those.
void Inbox::claim_stored(Granted& grant) {
  const auto stored = grant.request->stored;
  for (const auto& incoming : stored) {
    if (!grant.request) return;  // a row of another length was its last one
    if (incoming->state != Incoming::State::kStored) continue;
    std::vector<std::pair<size_t, size_t>> places;
    match(*incoming, grant, &places);
    size_t row = 0;
    uint64_t at = 0;
    for (const auto& [wanted, place] : places) {
      for (; row < wanted; ++row) at += Incoming::padded(incoming->rows[row].length);
      grant.to_copy.push_back({incoming, row, place, at, 0});
    }
  }
}

// Copies the next piece. False if it is to be tried again later: its stream was not done by `until`.
bool Inbox::copy_stored(Granted& grant, const Deadline& until, std::unique_lock<std::mutex>& lock) {
  std::vector<Piece> pieces;
  const auto& device = grant.placed.device_of(grant.placed.rows[grant.to_copy.front().place]);
  uint64_t room = device ? kDevicePiece : kHostPiece;
  for (const StoredRow& row : grant.to_copy) {
    const PlacedRows::Row& to = grant.placed.rows[row.place];
    if (room == 0 || grant.placed.device_of(to) != device) break;
    const uint64_t nbytes = std::min(room, to.length - row.n_copied);
    pieces.push_back({row.incoming->block, row.from + row.n_copied, &to, row.n_copied, nbytes});
    room -= nbytes;
  }
  begin_writing(grant);
  lock.unlock();
  std::vector<LandedRow> landed;
  for (const Piece& piece : pieces) {
    const uint64_t address = grant.placed.address_of(*piece.to) + piece.offset;
    uint8_t* from = piece.block->bytes() + piece.from;
    if (device) {
      landed.push_back({device, {address, from, piece.nbytes}});
    } else {
      copy_bytes(reinterpret_cast<uint8_t*>(address), from, piece.nbytes);
    }
  }
  // Should a device be lost that still reads from the block, it takes what nobody reads any more.
  if (device) {
    landing_of_devices()->copy(landed, grant.point.get(), until, [&grant] { return grant.is_closed.load(); });
  }
  lock.lock();
  end_writing(grant);
  const RowStatus copied = device ? landed.front().status : RowStatus::kOk;
  if (copied == RowStatus::kTimedOut) return false;
  // What a grant that was revoked meanwhile did not get is there for the next one.
  for (size_t i = 0; i < pieces.size() && grant.request; ++i) {
    StoredRow& row = grant.to_copy.front();
    row.n_copied += pieces[i].nbytes;
    if (copied != RowStatus::kOk || row.n_copied == pieces[i].to->length) settle_stored(grant, copied);
  }
  return true;
}

// The first row to copy is copied, or has failed.
void Inbox::settle_stored(Granted& grant, RowStatus status) {
  const StoredRow row = std::move(grant.to_copy.front());
  grant.to_copy.pop_front();
  (status == RowStatus::kOk ? n_claimed_rows_ : n_failed_rows_) += 1;
  settle_row(grant, row.place, status);
  if (status != RowStatus::kOk) return;
  Incoming& incoming = *row.incoming;
  incoming.statuses[row.row] = RowStatus::kDuplicate;
  const bool is_used_up = std::none_of(incoming.statuses.begin(), incoming.statuses.end(),
                                       [](RowStatus left) { return left == RowStatus::kOk; });
  if (is_used_up && incoming.state == Incoming::State::kStored) end(incoming);
}

}  // namespace p2pkv::offers
