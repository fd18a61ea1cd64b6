// One batch of reads over the streams of an endpoint: who reads what, and again if a stream is lost.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "transports/batch.h"
#include "transports/tcp/reader.h"

namespace p2pkv::tcp {

// The thread that drives the batch drives one stream itself, its own, and has a helper drive each of the
// others that have a share. Bytes reach local memory by system calls of these threads and in no other way: a
// stream that its thread has left writes nothing there any more, and what it has not brought may be read
// again. A stream that is abandoned is not lost: the rest of its answer is dropped as it comes.
class TcpBatch final : public Batch {
 public:
  TcpBatch(std::shared_ptr<TcpEndpoint> endpoint, std::shared_ptr<AttachedRegion> remote, Reads reads);
  ~TcpBatch() override { settle(Status::kCanceled); }

  // Sends the requests and sets the helpers to work.
  void start() override;

 protected:
  bool drive(const Deadline* deadline) override;
  void interrupt() override { endpoint_->sever(); }
  void quiesce() override;

 private:
  using Time = Deadline::Clock::time_point;
  using Progress = Stream::Progress;
  enum class Fault : uint8_t { kBroken, kSilent, kLate };
  static constexpr size_t kNobody = SIZE_MAX;
  // How often streams are looked after that other threads drive, or that are silent.
  static constexpr auto kLook = std::chrono::milliseconds(2);

  // The share of a stream, by the stream's number.
  struct Task {
    bool is_under_way = false;
    uint64_t nbytes = 0;
    uint64_t load = 0;  // on the rail when it was asked for, itself included
    Time began{};
    std::optional<Fault> called_off;     // for that, and its helper has not ended yet
    std::optional<Progress> ended = {};  // with helpers_mutex_: how its helper has
  };

  Rails& rails() const { return endpoint_->ports_->rails; }
  std::vector<std::unique_ptr<Strand>>& strands() const { return endpoint_->strands_; }

  void hear_proofs(Time now);
  void hear_proof(size_t number, Time now);
  // By rail, the streams that may be given something now: one of them, or all.
  std::vector<std::vector<size_t>> idle_strands(bool is_for_one);
  bool hand_out(const std::vector<uint32_t>& spans);
  void begin(size_t number, Share share);
  void help(size_t number);
  // What became of streams; false if the batch is over for that.
  bool take_own(Progress progress);
  bool collect();
  bool settle_task(size_t number, Progress progress);
  void finish_task(size_t number);
  bool lose(size_t number, Fault fault);
  void abandon(size_t number, Fault fault);
  void give_back(size_t number);
  void count(size_t number, Fault fault);
  bool go_on();
  void rest(const Deadline& deadline);

  // Looks for streams that are silent or late while others are not.
  bool look_after(Time now);
  void look_at(size_t number, Time now);
  double silence(size_t number, Time now) const;
  bool is_contradicted(size_t number, double patience) const;
  bool is_gone(size_t number, Time now) const;
  void ping(size_t number);
  void ask_others(size_t rail);
  bool is_late(size_t number, Time now) const;
  bool is_hopeless(Time now) const;
  void take_back(size_t number, Fault fault);
  void give_up(Status reason) { abort(reason); }

  const std::shared_ptr<TcpEndpoint> endpoint_;
  const std::shared_ptr<AttachedRegion> remote_;
  std::vector<Task> tasks_;
  std::vector<uint32_t> orphans_;  // spans that were lost with their stream
  size_t own_ = kNobody;
  size_t n_under_way_ = 0;
  size_t n_measured_ = 0;  // streams of each rail, where that is being measured
  uint64_t n_bytes_ = 0;
  Time began_{};
  Time looked_{};
  std::mutex helpers_mutex_;  // guards n_helping_, and Task::ended of all
  std::condition_variable helpers_ended_;
  size_t n_helping_ = 0;
  std::atomic<bool> has_ended_{false};  // some helper has, since collect()
};

}  // namespace p2pkv::tcp
