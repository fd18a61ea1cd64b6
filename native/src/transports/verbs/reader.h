// The reader's side of the verbs transport: several lanes to one owner.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "transports/batch_endpoint.h"
#include "transports/rail_shares.h"
#include "transports/verbs/lane.h"

namespace p2pkv::verbs {

class VerbsRemoteRegion final : public AttachedRegion {
 public:
  VerbsRemoteRegion(const Endpoint* endpoint, const RegionBlob& blob, const RegionKeys& keys)
      : AttachedRegion(endpoint, blob.region, blob.nbytes), keys(keys) {}

  const RegionKeys keys;
};

// What the endpoint needs of its transport, which it keeps alive.
struct VerbsHome {
  std::shared_ptr<Transport> transport;
  Rails rails;
  std::shared_ptr<Connector> connector;
  PeerPortsBook* book;
  RailCounters* counters;
  bool reaches_devices;
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
  // A rail has lost its lane, or has none that has proved itself and may be tried again; or one was left out
  // that may be there by now.
  bool is_worn() override;

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
    enum class State : uint8_t {
      kGood,
      kProving,  // its rail had failed: it has been pinged, and is given nothing before it has answered
    };
    std::unique_ptr<Lane> lane;
    State state = State::kGood;
    bool is_unproven = false;  // it was opened as kProving
  };
  bool make_lanes();
  void connect_lanes(const std::vector<LaneBlob>& peer, uint32_t packet);
  void prove_doubted(const std::string& ports);

  VerbsHome home_;  // fixed until release()
  Wakeup interrupted_;
  uint32_t nonce_ = 0;
  std::string failure_;
  std::shared_ptr<PeerPorts> ports_;  // from bind() on; a rail of it is a lane's place in lanes_
  std::vector<Connected> lanes_;      // fixed from bind() on, nearest first; then of the driving thread alone
  Clock::time_point retire_at_ = Clock::time_point::max();  // some rail was left out, but may be back by then
};

}  // namespace p2pkv::verbs
