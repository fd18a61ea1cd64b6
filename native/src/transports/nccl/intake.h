// A batch of reads as its line sees it: what to ask for, and where proven bytes go.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "transports/nccl/frames.h"
#include "transports/registered.h"
#include "transports/transport.h"

namespace p2pkv::nccl {

// What a batch leaves to its intake: the spans whose status is kPending.
struct Wanted {
  std::shared_ptr<RegisteredRegion> local;
  uint32_t remote;  // the region, by its owner's number
  std::vector<Span> spans;
  std::vector<Word> words;  // empty, or one per span
  std::vector<Status> statuses;
};

// NCCL never has the caller's memory: it receives into the line's, which outlives every call, so that no
// return waits for a device or for NCCL to let go. From there a request's bytes are copied here, on the
// line's thread, and only once they are proven. After close() nothing is. Thread-safe.
class Intake {
 public:
  explicit Intake(Wanted wanted);

  size_t n_requests() const { return requests_.size(); }
  uint64_t nbytes_of(size_t request) const { return requests_[request].nbytes; }
  // What the owner is asked for; a span that wants a word wants it with each of its parts.
  std::vector<SpanRequest> spans_of(size_t request) const;

  // Takes the bytes of a request, one span after another, with the owner's verdict on them: a word for each
  // span that wants one. False if they are not as many.
  bool land(size_t request, const uint8_t* bytes, std::string_view words);
  // The owner no longer has the region.
  void reject(size_t request);
  // The peer is lost, and with it what has not landed.
  void lose();

  enum class State : uint8_t { kPending, kComplete, kLost, kLocalClosed };
  // Waits until it is no longer kPending, or until the deadline; without one it only looks.
  State wait(const Deadline* deadline);
  // Makes a wait() in another thread return.
  void wake();
  // Nothing is written to local memory any more. Idempotent.
  void close();
  bool is_closed();
  // What became of the spans so far.
  std::vector<Status> statuses();

 private:
  // Of a span, as long as one request may be.
  struct Piece {
    uint32_t span;
    uint64_t skip;  // bytes of the span before it
    uint64_t nbytes;
  };
  struct Request {
    size_t first;  // in pieces_
    size_t end;
    uint64_t nbytes;
  };
  void plan();
  bool wants_word(const Piece& piece) const {
    return !wanted_.words.empty() && wanted_.words[piece.span].offset != kNoWord;
  }
  State state() const;
  bool take_word(const Piece& piece, std::string_view* words);
  void settle(const Request& request);

  Wanted wanted_;  // all but the statuses is fixed from the start on
  std::vector<Piece> pieces_;
  std::vector<Request> requests_;
  std::mutex mutex_;  // guards all below and the statuses; held for the copy of a request's bytes
  std::condition_variable changed_;
  std::vector<uint32_t> n_left_;  // pieces of each span that have not come
  size_t n_settled_ = 0;          // requests
  bool is_lost_ = false;
  bool is_local_closed_ = false;
  bool is_closed_ = false;
  bool is_woken_ = false;
};

}  // namespace p2pkv::nccl
