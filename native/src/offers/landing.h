// How rows come to devices: read into page-locked memory, and copied from there; or read straight from the
// peer's device, over a way that does that.
//
// A row on a device is treated as one in host memory is: it may hold anything until it is OK, which it is
// after the producer's answer; and the copy is complete before the producer is asked.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "offers/peer_reader.h"
#include "offers/staging_area.h"
#include "offers/stream_point.h"

namespace p2pkv::offers {

// A copy to one of several devices.
struct LandedRow {
  std::shared_ptr<cuda::Device> device;
  cuda::DeviceCopy copy;
  RowStatus status = RowStatus::kPending;  // then kOk, kTimedOut (its stream was not done) or kDeviceFailed
};

// Rows whose copies were begun, by device. When it goes, they have ended; `Landing::finish` says how.
struct LandingRows {
  struct OfDevice {
    std::shared_ptr<cuda::Device> device;
    bool was_lost;  // before
    cuda::StreamOutcome waited;
    std::unique_ptr<cuda::CopiesUnderWay> copies;  // null if what comes before them was not done
    std::string error;
  };
  std::vector<LandedRow> rows;
  std::vector<OfDevice> of_devices;
};

// Thread-safe.
class Landing {
 public:
  explicit Landing(std::shared_ptr<StagingArea> area) : area_(std::move(area)) {}

  StagingArea& area() { return *area_; }

  // As PeerReader::read, for rows in host memory and of devices. Returns when the copies are complete.
  // `point`: what devices have to do first; null: nothing.
  void read(PeerReader& reader, std::vector<PullRow>& rows, StreamPoint* point, const Deadline& deadline,
            PullJob& job);

  // From page-locked memory; sets the statuses. False: a device was lost, the host memory may still be read.
  bool copy(
      std::vector<LandedRow>& rows, StreamPoint* point, const Deadline& deadline,
      const std::function<bool()>& gives_up = [] { return false; });

  uint64_t n_bytes() const { return n_bytes_; }
  // That came from a device straight to another.
  uint64_t n_direct_bytes() const { return n_direct_bytes_; }
  // The last one; empty: none so far.
  std::string failure();

 private:
  // A part of a row that finds room in a loan, in which it is read, and from which it is copied.
  struct Piece {
    size_t row;
    uint64_t offset;  // in the row
    uint64_t nbytes;
    uint64_t staged_at;  // in the loan
  };
  struct Round {
    std::vector<Piece> pieces;
    std::vector<PullRow> reads;
    cuda::Staging::Loan loan;  // before the copies: it outlives them
    LandingRows copies;
  };

  LandingRows begin(std::vector<LandedRow> rows, cuda::HostMemory from, StreamPoint* point,
                    const Deadline& deadline, const std::function<bool()>& gives_up);
  bool finish(LandingRows* begun);
  void read_directly(PeerReader& reader, const std::vector<PullRow*>& rows, StreamPoint* point,
                     const Deadline& deadline, PullJob& job);
  void read_through_staging(PeerReader& reader, std::vector<PullRow*>& rows, StreamPoint* point,
                            const Deadline& deadline, PullJob& job);
  std::vector<Piece> cut(const std::vector<PullRow*>& rows, uint64_t room, size_t* row,
                         uint64_t* offset) const;
  cuda::Staging::Loan borrow(uint64_t left, std::optional<Round>* before, std::vector<PullRow*>& rows,
                             const Deadline& deadline, PullJob& job);
  void read_pieces(PeerReader& reader, const std::vector<PullRow*>& rows, Round* round,
                   const Deadline& deadline, PullJob& job);
  void begin_copies(const std::vector<PullRow*>& rows, Round* round, StreamPoint* point,
                    const Deadline& deadline, PullJob& job);
  void land(std::optional<Round>* round, std::vector<PullRow*>& rows, PullJob& job);

  const std::shared_ptr<StagingArea> area_;
  std::atomic<uint64_t> n_bytes_{0};
  std::atomic<uint64_t> n_direct_bytes_{0};
  std::mutex mutex_;  // guards failure_
  std::string failure_;
};

}  // namespace p2pkv::offers
