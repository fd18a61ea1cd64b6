// One connection of a tcp reader: asks for spans and scatters the answer into local memory.
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/fd.h"
#include "transports/registered.h"
#include "transports/tcp/frames.h"
#include "transports/tcp/server.h"
#include "transports/tcp/wire.h"

namespace p2pkv::tcp {

// What the streams of one batch share. Each stream writes the statuses of its own spans only.
struct ReadPlan {
  RegisteredRegion* local;  // null: a plan without bytes
  uint32_t remote_region;
  const std::vector<Span>* spans;
  const std::vector<Word>* words;
  std::vector<Status>* statuses;

  bool is_validated(uint32_t span) const { return !words->empty() && (*words)[span].offset != kNoWord; }
};

// Driven by one thread at a time; nothing here blocks. What is atomic any thread may look at.
class Stream {
 public:
  enum class Progress { kDone, kMoved, kBlocked, kLost, kLocalClosed };

  // Starts to connect and, as soon as that is possible, to greet. Without blocking. `local`: from where;
  // null: the kernel chooses. What follows the greeting goes over `wire`.
  void connect(const Address& address, const LocalAddress* local, const Hello& hello,
               std::unique_ptr<Wire> wire);
  // Sends what is to be sent, as far as possible: the Hello goes out before the server loses its patience.
  void flush();
  // Takes spans to read; the one before must be done.
  void begin(const ReadPlan& plan, std::vector<uint32_t> share);
  // Asks for an answer without bytes; the one before must be done.
  void ping();
  // The spans that have not settled.
  std::vector<uint32_t> unsettled() const;
  // Bytes that were asked for and have not come.
  uint64_t n_owed() const;
  // Its spans are others' to read from now on. What still comes of its answer is taken from the socket and
  // dropped; then it is done, and good for the next share.
  void abandon();
  // When something came last, and when something was asked for last; ns of the steady clock, 0: never.
  int64_t heard_ns() const { return heard_ns_.load(std::memory_order_relaxed); }
  int64_t asked_ns() const { return asked_ns_.load(std::memory_order_relaxed); }
  // Bytes of spans that have come since begin().
  uint64_t n_bytes() const { return n_bytes_.load(std::memory_order_relaxed); }
  // The longest silence since begin() that ended by itself; ns.
  int64_t longest_silence_ns() const { return longest_silence_ns_; }
  // Whether something has come that nobody has taken yet, be it an end.
  bool has_news() const;
  // One step: at most one system call that moves bytes.
  Progress advance();
  // The events to poll for after kBlocked.
  short events() const { return outgoing_.empty() ? POLLIN : POLLOUT; }
  int fd() const { return socket_.get(); }
  void shut_down();
  void reset() { socket_.reset(); }

 private:
  enum class Phase { kHeader, kBytesAndTrailer };

  Progress send_outgoing();
  void request_next();
  void hear(uint64_t nbytes);
  void expect_header();
  Progress receive();
  size_t gather(iovec* pieces);
  void took_bytes(uint64_t nbytes);
  bool on_header();
  bool on_trailer();
  void end_spans(size_t n_spans, bool is_good);
  const Span& span(size_t i) const { return (*plan_.spans)[share_[i]]; }

  UniqueFd socket_;
  std::unique_ptr<Wire> wire_;  // from connect() on
  std::atomic<int64_t> heard_ns_{0};
  std::atomic<int64_t> asked_ns_{0};
  std::atomic<uint64_t> n_bytes_{0};
  int64_t longest_silence_ns_ = 0;
  std::vector<SpanRequest> requests_;  // of one request; kept for its memory
  std::vector<uint8_t> outgoing_;
  size_t n_sent_ = 0;

  ReadPlan plan_{};
  std::vector<Status> ping_status_ = {Status::kPending};
  struct Abandoned {
    std::vector<Span> spans;
    std::vector<Word> words;
    std::vector<Status> statuses;
    std::vector<uint8_t> sink;
  };
  Abandoned abandoned_;          // what the rest of an answer is told by that nobody wants any more
  std::vector<uint32_t> share_;  // indexes of the spans to read, in order
  size_t n_requested_ = 0;       // of share_
  uint64_t request_id_ = 0;

  // The place in the answer.
  Phase phase_ = Phase::kHeader;
  size_t next_ = 0;          // the first span of share_ that has not ended
  uint64_t n_received_ = 0;  // bytes of it
  ChunkHeader chunk_{};
  size_t at_ = 0;  // the span the next byte of the chunk belongs to, and that byte's place in it
  uint64_t at_offset_ = 0;
  uint64_t chunk_left_ = 0;     // bytes
  std::vector<uint8_t> frame_;  // the header, or trailer and words, as far as received
  size_t n_frame_ = 0;
};

}  // namespace p2pkv::tcp
