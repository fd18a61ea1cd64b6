#include "offers/landing.h"

#include <algorithm>
#include <map>
#include <utility>

namespace p2pkv::offers {
namespace {

// Pending until the first of its pieces has settled; then the worst of them.
void settle(PullRow& row, Status status) {
  if (row.status == Status::kPending || row.status == Status::kOk) row.status = status;
}

}  // namespace

void Landing::read(PeerReader& reader, std::vector<PullRow>& rows, StreamPoint* point,
                   const Deadline& deadline, PullJob& job) {
  std::vector<PullRow> on_host;
  std::vector<size_t> numbers;
  std::vector<PullRow*> on_devices;
  std::vector<PullRow*> between_devices;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].local->device) {
      const bool is_direct = (rows[i].remote.flags & kOnDevice) != 0;
      (is_direct ? between_devices : on_devices).push_back(&rows[i]);
    } else {
      on_host.push_back(rows[i]);
      numbers.push_back(i);
    }
  }
  if (!on_host.empty()) reader.read(on_host, deadline, job);
  for (size_t i = 0; i < on_host.size(); ++i) rows[numbers[i]].status = on_host[i].status;
  if (!between_devices.empty()) read_directly(reader, between_devices, point, deadline, job);
  if (!on_devices.empty()) read_through_staging(reader, on_devices, point, deadline, job);
}

// The reads are the copies: they are complete when the reader returns.
void Landing::read_directly(PeerReader& reader, const std::vector<PullRow*>& rows, StreamPoint* point,
                            const Deadline& deadline, PullJob& job) {
  std::string error;
  const auto gives_up = [&job] { return job.is_broken(); };
  const auto waited = point ? point->wait(deadline, gives_up, &error) : cuda::StreamOutcome::kDone;
  std::vector<PullRow> reads;
  for (const PullRow* row : rows) reads.push_back(*row);
  if (waited == cuda::StreamOutcome::kDone) reader.read(reads, deadline, job);
  for (size_t i = 0; i < rows.size(); ++i) {
    PullRow& row = *rows[i];
    if (waited == cuda::StreamOutcome::kTimedOut) {
      settle(row, job.is_broken() ? Status::kCanceled : Status::kTimedOut);
    } else if (waited == cuda::StreamOutcome::kFailed || row.local->device->is_lost()) {
      row.has_failed_copy = true;
    } else {
      settle(row, reads[i].status);
      // Rows of other lengths were not asked for: out of range is what this device can't reach.
      row.is_unreachable = reads[i].status == Status::kOutOfRange || reads[i].status == Status::kPeerLost;
      if (reads[i].status == Status::kOk) n_direct_bytes_ += row.remote.length;
    }
  }
  const bool has_failed =
      std::any_of(rows.begin(), rows.end(), [](const PullRow* row) { return row->has_failed_copy; });
  if (!has_failed) return;
  const std::lock_guard lock(mutex_);
  failure_ = error.empty() ? "a CUDA device was lost while rows were copied from another one" : error;
}

void Landing::read_through_staging(PeerReader& reader, std::vector<PullRow*>& on_devices, StreamPoint* point,
                                   const Deadline& deadline, PullJob& job) {
  const auto gives_up = [&job] { return job.is_broken(); };
  uint64_t left = 0;
  for (const PullRow* row : on_devices) left += StagingArea::padded(row->remote.length);
  size_t row = 0;
  uint64_t offset = 0;  // in that row
  while (row < on_devices.size()) {
    auto loan = area_->borrow(1, std::min(left, area_->piece_nbytes()), deadline, gives_up);
    if (!loan || job.is_broken()) {
      area_->release(std::move(loan));
      break;
    }
    const auto pieces = cut(on_devices, loan.nbytes(), &row, &offset);
    for (const Piece& piece : pieces) left -= std::min(left, StagingArea::padded(piece.nbytes));
    read_pieces(reader, on_devices, pieces, &loan, point, deadline, job);
    area_->release(std::move(loan));
  }
  for (size_t i = row; i < on_devices.size(); ++i)
    settle(*on_devices[i], job.is_broken() ? Status::kCanceled : Status::kTimedOut);
}

// What fits into a loan, from `row` and `offset` on, which are moved behind it.
std::vector<Landing::Piece> Landing::cut(const std::vector<PullRow*>& rows, uint64_t room, size_t* row,
                                         uint64_t* offset) const {
  std::vector<Piece> pieces;
  uint64_t staged_at = 0;
  while (*row < rows.size() && staged_at < room) {
    const uint64_t nbytes = std::min(rows[*row]->remote.length - *offset, room - staged_at);
    pieces.push_back({*row, *offset, nbytes, staged_at});
    staged_at += StagingArea::padded(nbytes);
    *offset += nbytes;
    if (*offset < rows[*row]->remote.length) break;
    ++*row;
    *offset = 0;
  }
  return pieces;
}

void Landing::read_pieces(PeerReader& reader, std::vector<PullRow*>& rows, const std::vector<Piece>& pieces,
                          cuda::Staging::Loan* loan, StreamPoint* point, const Deadline& deadline,
                          PullJob& job) {
  std::vector<PullRow> reads;
  reads.reserve(pieces.size());
  const uint64_t base = area_->offset_of(*loan);
  for (const Piece& piece : pieces) {
    RowRecord remote = rows[piece.row]->remote;
    remote.offset += piece.offset;
    remote.length = piece.nbytes;
    reads.push_back({area_->memory(), base + piece.staged_at, remote});
  }
  reader.read(reads, deadline, job);
  std::vector<LandedRow> landed;
  for (size_t i = 0; i < pieces.size(); ++i) {
    PullRow& row = *rows[pieces[i].row];
    settle(row, reads[i].status);
    if (reads[i].status != Status::kOk) continue;
    const uint64_t to = row.local->address + row.local_offset + pieces[i].offset;
    landed.push_back({row.local->device, {to, loan->data() + pieces[i].staged_at, pieces[i].nbytes}});
  }
  const auto gives_up = [&job] { return job.is_broken(); };
  if (!copy(landed, point, deadline, gives_up)) loan->abandon();
  for (size_t i = 0, n = 0; i < pieces.size(); ++i) {
    if (reads[i].status != Status::kOk) continue;
    const RowStatus status = landed[n++].status;
    PullRow& row = *rows[pieces[i].row];
    if (status == RowStatus::kTimedOut) settle(row, job.is_broken() ? Status::kCanceled : Status::kTimedOut);
    if (status == RowStatus::kDeviceFailed) row.has_failed_copy = true;
  }
}

bool Landing::copy(std::vector<LandedRow>& rows, StreamPoint* point, const Deadline& deadline,
                   const std::function<bool()>& gives_up) {
  std::map<cuda::Device*, std::vector<cuda::DeviceCopy>> by_device;
  for (const LandedRow& row : rows) by_device[row.device.get()].push_back(row.copy);
  bool is_lost = false;
  for (const auto& [device, copies] : by_device) {
    std::string error;
    const bool was_lost = device->is_lost();
    const auto waited = point ? point->wait(deadline, gives_up, &error) : cuda::StreamOutcome::kDone;
    auto copied = cuda::CopyOutcome::kFailed;
    if (waited == cuda::StreamOutcome::kDone)
      copied = device->copy(copies, cuda::Direction::kToDevice, &error);
    is_lost |= copied == cuda::CopyOutcome::kLost;
    RowStatus status = copied == cuda::CopyOutcome::kDone ? RowStatus::kOk : RowStatus::kDeviceFailed;
    if (waited == cuda::StreamOutcome::kTimedOut) status = RowStatus::kTimedOut;
    for (LandedRow& row : rows) {
      if (row.device.get() == device) row.status = status;
      if (row.device.get() == device && status == RowStatus::kOk) n_bytes_ += row.copy.nbytes;
    }
    if (status != RowStatus::kDeviceFailed || was_lost) continue;  // that it is lost was said before
    const std::lock_guard lock(mutex_);
    failure_ = error;
  }
  return !is_lost;
}

std::string Landing::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace p2pkv::offers
