// One batch of reads over the lanes of an endpoint: who reads what, and again if a lane is lost.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "transports/batch.h"
#include "transports/verbs/reader.h"

namespace p2pkv::verbs {

// Everything is done by the thread that drives the batch. What a lane was asked for its device may write
// until the lane is destroyed: only then may others read it again. So a lane that falls silent is not merely
// suspected, as a stream of tcp is; it is lost, and only while another rail is heard.
class VerbsBatch final : public Batch {
 public:
  VerbsBatch(std::shared_ptr<VerbsEndpoint> endpoint, std::shared_ptr<VerbsRemoteRegion> remote, Reads reads);
  ~VerbsBatch() override { settle(Status::kCanceled); }

  // Posts what the queues take.
  void start() override;

 protected:
  bool drive(const Deadline* deadline) override;
  void interrupt() override { endpoint_->sever(); }
  void quiesce() override;

 private:
  using Time = Lane::Clock::time_point;
  using Connected = VerbsEndpoint::Connected;
  using State = Connected::State;
  enum class Step { kDone, kMoved, kBlocked, kEnded };
  enum class Fault { kBroken, kSilent };
  // How often lanes are looked after where there are several.
  static constexpr auto kLook = std::chrono::milliseconds(2);

  // The share of a lane, by the lane's number.
  struct Task {
    bool is_under_way = false;
    uint64_t nbytes = 0;
    uint64_t load = 0;  // on the rail when it was asked for, itself included
    Time began{};
  };

  std::vector<Connected>& lanes() const { return endpoint_->lanes_; }
  p2pkv::Rails& rails() const { return endpoint_->ports_->rails; }
  RailCounters::Rail& counters(size_t lane) const;
  BatchMemory memory();

  bool hand_out(const std::vector<uint32_t>& spans);
  void begin(size_t number, const std::vector<uint32_t>& share);
  Step step();
  bool advance(size_t number, bool* has_moved);
  void finish_task(size_t number);
  void lose(size_t number, Fault fault);
  bool go_on();
  void reject();
  Step sleep(const Deadline& deadline);
  void let_go();

  // Looks for lanes that are silent while others are not.
  bool look_after(Time now);
  void look_at(size_t number, Time now);
  void hear_proofs(Time now);
  void hear_proof(size_t number, Time now);
  double silence(size_t number, Time now) const;
  bool is_contradicted(size_t number, double patience) const;
  void ask_others(size_t number);
  bool is_hopeless(Time now) const;

  const std::shared_ptr<VerbsEndpoint> endpoint_;
  const std::shared_ptr<VerbsRemoteRegion> remote_;
  std::optional<RegisteredRegion::Use> use_;  // for as long as a device may write to local memory
  std::vector<Task> tasks_;
  std::vector<uint32_t> orphans_;  // spans that were lost with their lane
  Time looked_{};
};

}  // namespace p2pkv::verbs
