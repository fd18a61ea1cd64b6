// The tcp transport: puts the owner's and the reader's side together.
#include <unistd.h>

#include <algorithm>

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
    if (options.streams < 1 || options.streams > tcp::kMaxStreams) {
      *error = "streams is " + std::to_string(options.streams) + ", it must be 1 to " +
               std::to_string(tcp::kMaxStreams);
      return nullptr;
    }
    auto transport = std::make_shared<TcpTransport>();
    transport->n_streams_ = options.streams;
    transport->server_.reset(tcp::Server::start(options.listen, transport->regions_, error).release());
    return transport->server_ ? transport : nullptr;
  }
  ~TcpTransport() override { close(); }

  // Who reaches whom only connecting can tell.
  std::string domain() const override { return "tcp"; }
  uint16_t port() const override { return server_->address().port; }

  std::shared_ptr<MemoryRegion> register_memory(uint8_t* base, uint64_t nbytes, int, bool readable,
                                                std::string* error) override {
    auto region = regions_->add({base, nbytes, UniqueFd(), readable, tcp::kRegionMagic, {}});
    if (!region) *error = "the transport is closed";
    return region;
  }

  std::shared_ptr<Endpoint> open() override {
    auto endpoint =
        std::make_shared<tcp::TcpEndpoint>(tcp::TcpHome{shared_from_this(), server_.get(), n_streams_});
    if (!endpoints_.add(endpoint)) endpoint->close();
    return endpoint;
  }

  std::string accept(std::string_view remote, std::string* error) override {
    tcp::EndpointBlob reader;
    if (!from_blob(remote, tcp::kEndpointMagic, &reader, error)) return {};
    // The owner's half of an endpoint is its tokens alone: nothing to keep until the reader connects.
    const uint32_t n_tokens = std::clamp<uint32_t>(reader.n_streams, 1, tcp::kMaxStreams);
    return tcp::make_blob(*server_, n_streams_, n_tokens, server_->tokens().new_grant());
  }

  void close() override {
    if (getpid() != pid_) return;  // in a forked child all of it is the parent's
    const std::lock_guard closing(closing_);
    endpoints_.close();
    regions_->close();
    if (server_) server_->close();
  }

 private:
  uint32_t n_streams_ = 1;
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

}  // namespace p2pkv
