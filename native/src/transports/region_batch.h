// A batch of reads that is copied by whoever drives it, a slice at a time: from memory that a RegionEndpoint
// has asked its owner for.
//
// A slice is small enough to end soon after the deadline or an abort, and the words are asked after its
// copies have: only for spans that end in it.
#pragma once

#include <memory>
#include <vector>

#include "transports/batch.h"
#include "transports/region_endpoint.h"

namespace p2pkv {

class RegionBatch : public Batch {
 protected:
  // Some bytes of a span, copied in one go; all of one that is taken.
  struct Part {
    size_t span;
    uint64_t offset;
    uint64_t nbytes;
  };

  RegionBatch(RegionEndpoint& endpoint, AskedRegion& remote, Reads reads)
      : Batch(std::move(reads)), home_(endpoint), asked_(remote) {}

  // Copies the next slice, if anything is left of it, and settles what is complete. `deadline` is null where
  // it must not take long. False if the batch was aborted, or its memory closed, which aborts it.
  virtual bool copy_slice(const Deadline* deadline) = 0;
  // Whether the owner's memory is there to copy from, once it has answered; else the owner is lost.
  virtual bool begin() = 0;
  // Whether the span's word has its value now, after the bytes.
  virtual bool is_proven(size_t span) const = 0;

  bool drive(const Deadline* deadline) final;
  void interrupt() final { home_.sever(); }

  // The next parts of pending spans, about `nbytes` of them and each `most` at most; returns how many bytes
  // that are.
  uint64_t cut_parts(uint64_t nbytes, uint64_t most);
  const std::vector<Part>& parts() const { return parts_; }
  // The first `n` parts are copied, by whichever threads: only now may the words be asked.
  void settle_parts(size_t n);
  bool is_complete() const { return next_ >= spans_.size(); }
  // What is pending ends so, and nothing is left.
  void settle_rest(Status status);

 private:
  bool await_region(const Deadline* deadline);

  RegionEndpoint& home_;  // the subclass keeps both alive
  AskedRegion& asked_;
  // Of the driving thread alone.
  bool is_begun_ = false;
  size_t next_ = 0;          // the span to go on with
  uint64_t n_copied_ = 0;    // bytes of it
  std::vector<Part> parts_;  // of the slice under way; helpers of the copies read it
};

}  // namespace p2pkv
