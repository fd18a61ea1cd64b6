// The tcp transport: puts the owner's and the reader's side together.
#include <unistd.h>

#include <algorithm>

#include "net/libcrypto.h"
#include "transports/batch_endpoint.h"
#include "transports/tcp/frames.h"
#include "transports/tcp/reader.h"
#include "transports/tcp/server.h"
#include "transports/transports.h"

namespace p2pkv {
namespace {

class TcpTransport final : public TcpTransportBase {
 public:
  static std::shared_ptr<TcpTransport> start(const TcpOptions& options, std::string* error) {
    if (options.streams > tcp::kMaxStreams || options.addresses.size() > tcp::kMaxAddresses) {
      const bool is_streams = options.streams > tcp::kMaxStreams;
      const size_t n = is_streams ? options.streams : options.addresses.size();
      *error =
          (is_streams ? "streams is " : "addresses are ") + std::to_string(n) + ", at most 8 are possible";
      return nullptr;
    }
    auto transport = std::make_shared<TcpTransport>();
    transport->n_streams_ = options.streams;
    if (!find_local(options.addresses, &transport->locals_, error)) return nullptr;
    std::vector<ListenAt> at;
    for (const LocalAddress& local : transport->locals_) {
      at.push_back({local.text, {}, options.listen.ports, local.device});
    }
    if (at.empty()) at.push_back(options.listen);
    std::shared_ptr<tcp::Sealing> sealing;
    if (options.encrypts) {
      const std::string missing = LibCrypto::missing();
      if (!missing.empty()) {
        *error = "tcp can't be encrypted: " + missing;
        return nullptr;
      }
      sealing = std::make_shared<tcp::Sealing>(options.rekey_after);
    }
    transport->server_.reset(tcp::Server::start(at, transport->regions_, sealing, error).release());
    return transport->server_ ? transport : nullptr;
  }
  ~TcpTransport() override { close(); }

  // Who reaches whom only connecting can tell, but for who encrypts and who doesn't.
  std::string domain() const override { return server_->sealing() != nullptr ? "tcp:aes-256-gcm" : "tcp"; }
  uint64_t n_forged() const override {
    return server_->sealing() != nullptr ? server_->sealing()->n_forged() : 0;
  }
  std::vector<RailTotals> rail_totals() const override { return counters_.totals(); }
  uint16_t port() const override { return server_->addresses()[0].port; }

  std::shared_ptr<MemoryRegion> register_memory(uint8_t* base, uint64_t nbytes, int, bool readable,
                                                std::string* error) override {
    auto region = regions_->add({base, nbytes, UniqueFd(), readable, tcp::kRegionMagic, {}});
    if (!region) *error = "the transport is closed";
    return region;
  }

  std::shared_ptr<Endpoint> open() override {
    auto endpoint = std::make_shared<tcp::TcpEndpoint>(
        tcp::TcpHome{shared_from_this(), server_.get(), n_streams_, &locals_, &book_, &counters_});
    if (!endpoints_.add(endpoint)) endpoint->close();
    return endpoint;
  }

  std::string accept(std::string_view remote, std::string* error) override {
    tcp::EndpointBlob reader;
    if (!tcp::take_blob(remote, *server_, &reader, error)) return {};
    if (remote.size() < sizeof reader + reader.n_tokens * sizeof(Token)) {
      *error = "handshake is malformed";
      return {};
    }
    // The owner's half of an endpoint is its tokens alone: nothing to keep until the reader connects.
    const bool takes_more = (reader.more & tcp::kTakesMore) != 0;
    const auto n_addresses = static_cast<uint32_t>(takes_more ? server_->addresses().size() : 1);
    const uint32_t n_tokens = std::clamp<uint32_t>(reader.n_streams * n_addresses, 1, tcp::kMaxStreams);
    return tcp::make_blob(*server_, {n_streams_, n_tokens, n_addresses, server_->tokens().new_grant()});
  }

  void close() override {
    if (getpid() != pid_) return;  // in a forked child all of it is the parent's
    const std::lock_guard closing(closing_);
    endpoints_.close();
    regions_->close();
    if (server_) server_->close();
  }

 private:
  uint32_t n_streams_ = 0;
  std::vector<LocalAddress> locals_;  // fixed from the start on
  PeerPortsBook book_;
  RailCounters counters_;
  const std::shared_ptr<RegionTable> regions_ = std::make_shared<RegionTable>();
  ThreadOwner<tcp::Server> server_;
  EndpointList endpoints_;
  const pid_t pid_ = getpid();
  std::mutex closing_;  // held by the one close() that does the work, so that the others return after it
};

}  // namespace

std::shared_ptr<TcpTransportBase> make_tcp_transport(const TcpOptions& options, std::string* error) {
  return TcpTransport::start(options, error);
}

std::string encryption_missing() {
  return LibCrypto::missing();
}

std::string encryption_library() {
  return LibCrypto::version_text();
}

}  // namespace p2pkv
