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

// While a round is copied to its devices, the next one is read.
void Landing::read_through_staging(PeerReader& reader, std::vector<PullRow*>& on_devices, StreamPoint* point,
                                   const Deadline& deadline, PullJob& job) {
  uint64_t left = 0;
  for (const PullRow* row : on_devices) left += StagingArea::padded(row->remote.length);
  size_t row = 0;
  uint64_t offset = 0;          // in that row
  std::optional<Round> before;  // whose copies are under way
  while (row < on_devices.size()) {
    Round round;
    round.loan = borrow(left, &before, on_devices, deadline, job);
    if (!round.loan || job.is_broken()) {
      area_->release(std::move(round.loan));
      break;
    }
    round.pieces = cut(on_devices, round.loan.nbytes(), &row, &offset);
    for (const Piece& piece : round.pieces) left -= std::min(left, StagingArea::padded(piece.nbytes));
    read_pieces(reader, on_devices, &round, deadline, job);
    land(&before, on_devices, job);  // so that whoever ends the job waits for one round's copies at most
    begin_copies(on_devices, &round, point, deadline, job);
    before = std::move(round);
  }
  land(&before, on_devices, job);
  for (size_t i = row; i < on_devices.size(); ++i)
    settle(*on_devices[i], job.is_broken() ? Status::kCanceled : Status::kTimedOut);
}

// Only who holds no room may wait for some, or all would wait for each other.
cuda::Staging::Loan Landing::borrow(uint64_t left, std::optional<Round>* before, std::vector<PullRow*>& rows,
                                    const Deadline& deadline, PullJob& job) {
  const uint64_t wanted = std::min(left, area_->piece_nbytes());
  if (*before) {
    auto loan = area_->try_borrow(wanted);
    if (loan) return loan;
    land(before, rows, job);
  }
  return area_->borrow(1, wanted, deadline, [&job] { return job.is_broken(); });
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

void Landing::read_pieces(PeerReader& reader, const std::vector<PullRow*>& rows, Round* round,
                          const Deadline& deadline, PullJob& job) {
  round->reads.reserve(round->pieces.size());
  const uint64_t base = area_->offset_of(round->loan);
  for (const Piece& piece : round->pieces) {
    RowRecord remote = rows[piece.row]->remote;
    remote.offset += piece.offset;
    remote.length = piece.nbytes;
    round->reads.push_back({area_->memory(), base + piece.staged_at, remote});
  }
  reader.read(round->reads, deadline, job);
}

void Landing::begin_copies(const std::vector<PullRow*>& rows, Round* round, StreamPoint* point,
                           const Deadline& deadline, PullJob& job) {
  std::vector<LandedRow> landed;
  for (size_t i = 0; i < round->pieces.size(); ++i) {
    const Piece& piece = round->pieces[i];
    PullRow& row = *rows[piece.row];
    settle(row, round->reads[i].status);
    if (round->reads[i].status != Status::kOk) continue;
    const uint64_t to = row.local->address + row.local_offset + piece.offset;
    landed.push_back({row.local->device, {to, round->loan.data() + piece.staged_at, piece.nbytes}});
  }
  round->copies = begin(std::move(landed), cuda::HostMemory::kLocked, point, deadline,
                        [&job] { return job.is_broken(); });
}

// Waits for a round's copies, and gives its room back.
void Landing::land(std::optional<Round>* round, std::vector<PullRow*>& rows, PullJob& job) {
  if (!*round) return;
  Round& landing = **round;
  if (!finish(&landing.copies)) landing.loan.abandon();
  for (size_t i = 0, n = 0; i < landing.pieces.size(); ++i) {
    if (landing.reads[i].status != Status::kOk) continue;
    const RowStatus status = landing.copies.rows[n++].status;
    PullRow& row = *rows[landing.pieces[i].row];
    if (status == RowStatus::kTimedOut) settle(row, job.is_broken() ? Status::kCanceled : Status::kTimedOut);
    if (status == RowStatus::kDeviceFailed) row.has_failed_copy = true;
  }
  area_->release(std::move(landing.loan));
  round->reset();
}

bool Landing::copy(std::vector<LandedRow>& rows, StreamPoint* point, const Deadline& deadline,
                   const std::function<bool()>& gives_up) {
  LandingRows begun = begin(std::move(rows), cuda::HostMemory::kAny, point, deadline, gives_up);
  const bool is_sound = finish(&begun);
  rows = std::move(begun.rows);
  return is_sound;
}

LandingRows Landing::begin(std::vector<LandedRow> rows, cuda::HostMemory from, StreamPoint* point,
                           const Deadline& deadline, const std::function<bool()>& gives_up) {
  std::map<std::shared_ptr<cuda::Device>, std::vector<cuda::DeviceCopy>> by_device;
  for (const LandedRow& row : rows) by_device[row.device].push_back(row.copy);
  LandingRows begun{std::move(rows), {}};
  for (const auto& [device, copies] : by_device) {
    std::string error;
    const bool was_lost = device->is_lost();
    const auto waited = point ? point->wait(deadline, gives_up, &error) : cuda::StreamOutcome::kDone;
    auto under_way = waited == cuda::StreamOutcome::kDone
                         ? device->begin_copy(copies, cuda::Direction::kToDevice, from)
                         : nullptr;
    begun.of_devices.push_back({device, was_lost, waited, std::move(under_way), std::move(error)});
  }
  return begun;
}

// As `copy`.
bool Landing::finish(LandingRows* begun) {
  bool is_lost = false;
  for (LandingRows::OfDevice& of_device : begun->of_devices) {
    auto copied = cuda::CopyOutcome::kFailed;
    if (of_device.copies) copied = of_device.copies->wait(&of_device.error);
    is_lost |= copied == cuda::CopyOutcome::kLost;
    RowStatus status = copied == cuda::CopyOutcome::kDone ? RowStatus::kOk : RowStatus::kDeviceFailed;
    if (of_device.waited == cuda::StreamOutcome::kTimedOut) status = RowStatus::kTimedOut;
    for (LandedRow& row : begun->rows) {
      if (row.device != of_device.device) continue;
      row.status = status;
      if (status == RowStatus::kOk) n_bytes_ += row.copy.nbytes;
    }
    if (status != RowStatus::kDeviceFailed || of_device.was_lost)
      continue;  // that it is lost was said before
    const std::lock_guard lock(mutex_);
    failure_ = of_device.error;
  }
  return !is_lost;
}

std::string Landing::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace p2pkv::offers
