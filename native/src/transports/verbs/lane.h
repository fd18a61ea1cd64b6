// A lane: one of an endpoint's connections to its peer, each over another pair of rails.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transports/verbs/connector.h"
#include "transports/verbs/loopback.h"
#include "transports/verbs/memory.h"
#include "transports/verbs/plan.h"
#include "transports/verbs/queue_pair.h"

namespace p2pkv::verbs {

// What a batch reads, and where to; all by reference, and valid until finish().
struct BatchMemory {
  const std::vector<Span>& spans;
  const std::vector<Word>& words;
  std::vector<Status>& statuses;
  const Registration& local;
  const RegionKeys& remote;
};

// Used by one thread at a time: the one that drives the batch.
class Lane {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Progress {
    kDone,     // everything that was begun has settled
    kMoved,    // more may be there at once
    kBlocked,  // wait for fd() after arm()
    kLost,     // the peer or the way to it is gone
    kRefused,  // the peer has no such region any more
    kLocalClosed,
  };

  // `reaches_devices`: it may read into memory of devices. Null, with the reason in `error`.
  static std::unique_ptr<Lane> create(std::shared_ptr<Rail> rail, uint8_t rail_number, bool reaches_devices,
                                      std::string* error);
  ~Lane() { destroy(); }

  LaneBlob describe() const { return pair_->describe(rail_number_); }
  // Begins to connect; what comes of it advance() finds.
  void connect(const LaneBlob& peer, uint32_t first_packet, Connector& connector);
  const Outcome& outcome() const { return outcome_; }

  // Begins to read a share of the batch; while another is under way, after it.
  void begin(const BatchMemory& batch, const std::vector<uint32_t>& share);
  // Posts what there is room for. What fails, advance() finds.
  void post_first();
  Progress advance();
  // Asks for an answer without bytes of the batch; for a lane that has nothing to read.
  void ping();
  // Whether one is awaited.
  bool is_pinged() const { return is_pinged_; }
  // What became of ping(): kDone, kBlocked or kLost.
  Progress listen();
  bool has_work() const { return batch_.has_value(); }
  // Whether the peer has ever answered.
  bool is_proven() const { return is_proven_; }
  // When something came last, and when something was asked for last. What came is known once it was polled.
  Clock::time_point heard_at() const { return heard_at_; }
  Clock::time_point silent_since() const { return std::max(heard_at_, asked_at_); }
  // The longest silence since then that ended by itself.
  Clock::duration take_longest_silence() { return std::exchange(longest_silence_, {}); }
  // Numbers of the spans that were begun and have not settled.
  std::vector<uint32_t> unsettled() const;
  void finish();

  // From its return on nothing of it is written to local memory. The lane is done for.
  void destroy();
  bool is_alive() const { return pair_ != nullptr; }
  // Tells the peer that this end is gone, and waits a little for the message to leave.
  void say_good_bye();

  int fd() const { return completions_->fd(); }
  void arm() { completions_->arm(); }
  void drain() { completions_->drain(); }
  int numa_node() const { return rail_->numa_node(); }
  uint8_t rail_number() const { return rail_number_; }

 private:
  Lane() = default;
  bool is_connecting() const { return !is_known(outcome_, 0.0); }
  bool post(bool* has_moved);
  Progress take_completions(bool* has_moved);
  bool push_to_device();
  void settle_chunks();
  ibv_send_wr to_request(const PlannedRead& read, ibv_sge* pieces) const;

  std::shared_ptr<Rail> rail_;
  uint8_t rail_number_ = 0;  // of the device
  uint32_t depth_ = 0;
  uint32_t max_pieces_ = 0;
  uint8_t peer_rail_ = 0;
  const Pages word_buffer_{kChunksInFlight * kChunkWordBytes};
  std::shared_ptr<Registration> word_memory_;
  std::shared_ptr<CompletionQueue> completions_;
  std::shared_ptr<QueuePair> pair_;     // destroyed before its completion queue, as the next
  std::unique_ptr<Loopback> loopback_;  // null unless it reaches devices
  Outcome outcome_;                     // of connecting it; nothing is posted before it is known

  // Of the batch under way. Reads are numbered as in the plan.
  std::optional<BatchMemory> batch_;
  std::optional<ReadPlan> plan_;
  uint32_t n_posted_ = 0;
  uint32_t n_signalled_ = 0;  // reads up to the last that will report
  uint32_t n_arrived_ = 0;
  // Reads whose bytes are in local memory for good: where that is a device's, it takes a read of the rail's
  // own behind them.
  uint32_t n_landed_ = 0;
  uint32_t n_pushing_ = 0;  // reads that will be when the one under way has ended
  uint32_t n_chunks_settled_ = 0;
  uint32_t n_chunks_posted_ = 0;
  Clock::time_point heard_at_{}, asked_at_{};
  Clock::duration longest_silence_{};
  // The device does not tell a connection that leads nowhere from a slow one for seconds. An answer to the
  // first read, of the beacon, tells.
  bool is_proven_ = false;
  bool is_probing_ = false;            // a read of the beacon is under way
  bool is_pinged_ = false;             // one is wanted, or under way
  std::vector<ibv_send_wr> requests_;  // room for one doorbell
  std::vector<ibv_sge> sges_;
};

}  // namespace p2pkv::verbs
