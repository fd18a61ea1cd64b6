// The reader's side of the tcp transport: streams to one owner over all rails that lead to it.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "transports/batch_endpoint.h"
#include "transports/rail_shares.h"
#include "transports/tcp/helper.h"
#include "transports/tcp/rail_ends.h"
#include "transports/tcp/server.h"
#include "transports/tcp/stream.h"

namespace p2pkv::tcp {

// What the endpoint needs of its transport, which it keeps alive.
struct TcpHome {
  std::shared_ptr<Transport> transport;
  Server* server;
  uint32_t n_streams;                       // of each rail; 0: as many as pay
  const std::vector<LocalAddress>* locals;  // empty: the kernel chooses
  PeerPortsBook* book;
  RailCounters* counters;

  // How many streams of a rail there are at most.
  uint32_t most_streams() const { return n_streams > 0 ? n_streams : kMostMeasured; }
  static constexpr uint32_t kMostMeasured = 4;  // where the number is measured
};

// How `server` presents itself, with `n_tokens` for the connections that its reader may make under one grant,
// and the key of their session if it encrypts.
struct Half {
  uint32_t n_streams;
  uint32_t n_tokens;
  size_t n_addresses;  // that are told
  uint64_t grant;
};
std::string make_blob(Server& server, const Half& half);
// Takes the fixed part of an end's half. False, with the reason in `error`, also for one that encrypts where
// `server` doesn't, or the other way round.
bool take_blob(std::string_view remote, const Server& server, EndpointBlob* blob, std::string* error);

// A connection, and the thread that may drive it.
struct Strand {
  enum class State : uint8_t {
    kGood,
    kSuspected,  // it fell silent, or others of its rail did: it owes an answer, and is given nothing before
    kProving,    // it was opened when its rail had failed: likewise, and the rail's pause has to be over
    kDead,
  };
  size_t rail = 0;
  Stream stream;
  ThreadOwner<Helper> helper;  // from the first batch on that needs it
  std::atomic<State> state{State::kGood};
  bool is_pinged = false;    // or abandoned, and has not answered
  bool is_counted = false;   // among the failures of its rail, since it was good
  bool is_unproven = false;  // it was opened as kProving
  int64_t opened_ns = 0;
};

class TcpEndpoint final : public BatchEndpoint {
 public:
  explicit TcpEndpoint(TcpHome home);
  ~TcpEndpoint() override { close(); }

  std::shared_ptr<RemoteRegion> attach(std::string_view region, std::string* error) override;
  // A rail has lost its streams, or has none that has proved itself and may be tried again; or another number
  // of streams is wanted.
  bool is_worn() override;

 protected:
  std::string make_half() override;
  bool take_half(std::string_view remote, std::string* error) override;
  std::shared_ptr<Batch> make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) override;
  void shutdown_sockets() override;
  void release() override;

 private:
  friend class TcpBatch;
  bool parse(std::string_view remote, std::vector<Address>* addresses, std::vector<Token>* tokens) const;
  std::unique_ptr<Wire> make_wire(std::string_view remote, const Hello& hello) const;

  const TcpHome home_;
  const uint64_t grant_;
  std::shared_ptr<PeerPorts> ports_;  // from bind() on
  size_t n_per_rail_ = 1;             // streams
  std::vector<std::unique_ptr<Strand>>
      strands_;  // fixed from bind() on; each driven by one thread of a batch
};

}  // namespace p2pkv::tcp
