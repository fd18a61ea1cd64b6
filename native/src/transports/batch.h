// A transfer of a built-in transport: who drives it, how it ends early, and when local memory is the caller's
// again.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "transports/registered.h"
#include "transports/transport.h"

namespace p2pkv {

// What a batch is to read: the spans whose status is kPending.
struct Reads {
  std::shared_ptr<RegisteredRegion> local;
  std::vector<Span> spans;
  std::vector<Word> words;  // empty, or one per span
  std::vector<Status> statuses;
  Takes takes;  // of a transport that lends
};

// One batch of reads. Its bytes are moved by the threads that call done(), advance() and wait(), one at a
// time, plus what helpers the subclass has. It ends in one of two ways: drive() reports every span settled,
// or somebody aborts it; then no helper touches local memory any more once quiesce() has returned, and
// pending spans become what abort() said.
class Batch : public Transfer {
 public:
  // Asks for the first bytes, without blocking. Called once, with the endpoint's mutex held. If it throws,
  // the batch's end takes back what it had asked for; that takes the mutex.
  virtual void start() {}
  bool done() final;
  bool advance(double timeout) final;
  void wait(double timeout) final;
  const std::vector<Status>& statuses() const final { return statuses_; }

  // Counts the batch in `n_settled`, with what it has done before, once it has settled. Whoever owns the
  // count outlives the batch; it is how he knows of one that is being destroyed, which no pointer leads to
  // any more.
  void count_in(std::atomic<uint64_t>* n_settled) { n_settled_ = n_settled; }
  // Ends the batch early, for the first reason given; returns at once.
  void abort(Status reason);
  // Ends the batch early and returns when nothing touches local memory. Does nothing once it has settled.
  void settle(Status reason);
  bool has_settled() const { return has_settled_.load(std::memory_order_acquire); }
  bool reads_into(const RegisteredRegion& region) const { return local_.get() == &region; }

 protected:
  explicit Batch(Reads reads)
      : local_(std::move(reads.local)),
        spans_(std::move(reads.spans)),
        words_(std::move(reads.words)),
        takes_(std::move(reads.takes)),
        statuses_(std::move(reads.statuses)) {}

  // Moves bytes until `deadline`, or without blocking if it is null. True once every span has settled; false
  // at the deadline, when it would block, and soon after abort().
  virtual bool drive(const Deadline* deadline) = 0;
  // Makes a drive() that blocks in another thread, and the helpers, return soon.
  virtual void interrupt() = 0;
  // Called after abort(), by the thread that drives: returns when helpers are out of local memory.
  virtual void quiesce() = 0;

  bool is_aborted() const { return abort_reason_.load(std::memory_order_acquire) != Status::kPending; }
  bool is_validated(size_t span) const { return !words_.empty() && words_[span].offset != kNoWord; }

  const std::shared_ptr<RegisteredRegion> local_;
  const std::vector<Span> spans_;
  const std::vector<Word> words_;  // empty, or one per span
  const Takes takes_;              // of a transport that lends
  std::vector<Status> statuses_;   // written by the driving thread, and by helpers for their own spans

 private:
  class Turn;
  bool take_turn(const Deadline* deadline, bool may_block);
  void end_turn();
  void finish();

  std::atomic<Status> abort_reason_{Status::kPending};
  std::atomic<bool> has_settled_{false};
  std::atomic<uint64_t>* n_settled_ = nullptr;
  std::mutex mutex_;  // guards is_driven_
  std::condition_variable turn_ended_;
  bool is_driven_ = false;
};

// The outcome of a read that could not be posted.
class SettledTransfer final : public Transfer {
 public:
  explicit SettledTransfer(std::vector<Status> statuses) : statuses_(std::move(statuses)) {}
  bool done() override { return true; }
  bool advance(double) override { return true; }
  void wait(double) override {}
  const std::vector<Status>& statuses() const override { return statuses_; }

 private:
  const std::vector<Status> statuses_;
};

// What the pending spans hold.
uint64_t n_pending_bytes(const std::vector<Span>& spans, const std::vector<Status>& statuses);

// The numbers of the pending spans in shares of about equal size, in order. Neighbouring spans of one page,
// which share a word, stay together.
std::vector<std::vector<uint32_t>> split_spans(const std::vector<Span>& spans, const std::vector<Word>& words,
                                               const std::vector<Status>& statuses, size_t n_shares);

// The numbers of the pending spans, in order.
std::vector<uint32_t> pending_spans(const std::vector<Status>& statuses);

// Pages in a row, as numbers in a list of spans: [first, end).
struct Slice {
  size_t first;
  size_t end;
  uint64_t nbytes;
};
// The spans of `list` in slices of `nbytes` each, or of one page where that has more. Neighbouring spans of
// one page, which share a word, stay together.
std::vector<Slice> cut_slices(const std::vector<Span>& spans, const std::vector<Word>& words,
                              const std::vector<uint32_t>& list, uint64_t nbytes);

// Spans of `list` in shares of about equal size, in order, none of them empty. Neighbouring spans of one page
// stay together.
struct Share {
  std::vector<uint32_t> spans;
  uint64_t nbytes = 0;
};
std::vector<Share> split_list(const std::vector<Span>& spans, const std::vector<Word>& words,
                              const std::vector<uint32_t>& list, size_t n_shares);

// kPending for each span that may be posted, kOutOfRange for the others.
std::vector<Status> screen_spans(const std::vector<Span>& spans, const std::vector<Word>& words,
                                 uint64_t local_nbytes, uint64_t remote_nbytes);

}  // namespace p2pkv
