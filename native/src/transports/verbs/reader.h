// The reader's side of the verbs transport: several lanes to one owner, a batch spread over them.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "transports/batch_endpoint.h"
#include "transports/verbs/lane.h"

namespace p2pkv::verbs {

class VerbsRemoteRegion final : public AttachedRegion {
 public:
  VerbsRemoteRegion(const Endpoint* endpoint, const RegionBlob& blob, const RegionKeys& keys)
      : AttachedRegion(endpoint, blob.region, blob.nbytes), keys(keys) {}

  const RegionKeys keys;
};

// Which ways between a rail here and one there failed lately while another way to the same peer worked: they
// are left out of new endpoints for a while. Thread-safe.
class FailedWays {
 public:
  using Way = std::pair<Gid, Gid>;
  void add(const Way& way);
  bool contains(const Way& way);

 private:
  std::mutex mutex_;  // guards until_
  std::map<Way, std::chrono::steady_clock::time_point> until_;
};

// What the endpoint needs of its transport, which it keeps alive.
struct VerbsHome {
  std::shared_ptr<Transport> transport;
  Rails rails;
  std::shared_ptr<Connector> connector;
  std::shared_ptr<FailedWays> failed_ways;
};

// Numbers that only the two ends know, from which both number their packets.
uint32_t first_packet(uint32_t our_nonce, uint32_t their_nonce);
// An EndpointBlob and its lanes; false, with the reason in `error`, if `text` is none.
bool parse_endpoint(std::string_view text, EndpointBlob* blob, std::vector<LaneBlob>* lanes,
                    std::string* error);

// Its queue pairs are made in describe() and connected in bind().
class VerbsEndpoint final : public BatchEndpoint {
 public:
  explicit VerbsEndpoint(VerbsHome home);
  ~VerbsEndpoint() override { close(); }

  std::string failure() override;
  std::shared_ptr<RemoteRegion> attach(std::string_view region, std::string* error) override;

 protected:
  std::string make_half() override;
  bool take_half(std::string_view remote, std::string* error) override;
  std::shared_ptr<Batch> make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) override;
  void shutdown_sockets() override { interrupted_.set(); }
  void release() override;

 private:
  friend class VerbsBatch;
  using Clock = std::chrono::steady_clock;

  struct Connected {
    std::unique_ptr<Lane> lane;
    FailedWays::Way way;
  };
  bool make_lanes();
  void connect_lanes(const std::vector<LaneBlob>& peer, uint32_t packet);

  VerbsHome home_;  // fixed until release()
  Wakeup interrupted_;
  uint32_t nonce_ = 0;
  std::string failure_;
  std::vector<Connected> lanes_;  // fixed from bind() on, nearest first; then of the driving thread alone
  Clock::time_point retire_at_ = Clock::time_point::max();  // some rail was left out, but may be back by then
};

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
  enum class Step { kDone, kMoved, kBlocked, kEnded };
  std::vector<Lane*> alive() const;
  BatchMemory memory();
  Step step();
  bool hand_over(size_t lane);
  bool drop_stalled();
  void reject();
  Step sleep(const Deadline& deadline);
  void let_go();

  const std::shared_ptr<VerbsEndpoint> endpoint_;
  const std::shared_ptr<VerbsRemoteRegion> remote_;
  std::optional<RegisteredRegion::Use> use_;  // for as long as a device may write to local memory
};

}  // namespace p2pkv::verbs
