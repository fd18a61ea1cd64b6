// The ucx transport: puts the owner's and the reader's side together.
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "transports/batch_endpoint.h"
#include "transports/transports.h"
#include "transports/ucx/reader.h"
#include "transports/ucx/server.h"
#include "transports/ucx/settings.h"

namespace p2pkv {
namespace {

// Loopback reaches the processes of this host and network namespace only; and both ends must mean the same
// fabric.
std::string ucx_domain(const ucx::Address& address, bool trusts_network) {
  if (!address.is_loopback()) return trusts_network ? "ucx:tcp" : "ucx";
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  struct stat network{};
  stat("/proc/self/ns/net", &network);
  return "ucx:" + boot_id + ":" + std::to_string(network.st_ino);
}

// A context for the node's own address, which it finds.
std::shared_ptr<ucx::Context> open_context(const UcxOptions& options, ucx::Address* address,
                                           std::string* error) {
  if (!ucx::Address::resolve(options.host, address, error)) return nullptr;
  // UCX is given an address of its own, never all of them.
  if (address->is_wildcard() && !ucx::Address::resolve(options.advertise, address, error)) return nullptr;
  if (address->interface().empty()) {
    *error = "no interface of this machine has the address of '" + options.host + "'";
    return nullptr;
  }
  ucx::Settings settings;
  if (!ucx::choose_settings(*address, options.trusts_network, &settings, error)) return nullptr;
  auto context = ucx::Context::make(settings, error);
  if (context && ucx::find_resources(*context).empty()) {
    *error = "UCX finds no transport that reaches another process";
    if (!address->is_loopback() && !options.trusts_network) {
      *error +=
          "; tcp is left out because over it any peer could name any address, unless its option "
          "trust_network is set";
    }
    return nullptr;
  }
  return context;
}

class UcxTransport final : public Transport {
 public:
  static std::shared_ptr<UcxTransport> start(const UcxOptions& options, std::string* error) {
    ucx::Address address;
    auto context = open_context(options, &address, error);
    if (!context) return nullptr;
    auto transport = std::make_shared<UcxTransport>();
    transport->domain_ = ucx_domain(address, options.trusts_network);
    transport->server_.reset(ucx::Server::start(std::move(context), transport->regions_, error).release());
    return transport->server_ && transport->ender_->start(error) ? transport : nullptr;
  }
  ~UcxTransport() override { close(); }

  std::string domain() const override { return domain_; }

  std::shared_ptr<MemoryRegion> register_memory(uint8_t* base, uint64_t nbytes, int, bool readable,
                                                std::string* error) override {
    RegisteredRegion::Options options{base, nbytes, UniqueFd(), readable, ucx::kRegionMagic, {}};
    if (readable) {
      options.on_closing = [home = weak_from_this()](const RegisteredRegion& region) {
        if (const auto transport = std::static_pointer_cast<UcxTransport>(home.lock())) {
          transport->server_->drop_readers_of(region.id());
        }
      };
    }
    auto region = regions_->add(std::move(options));
    if (!region) *error = "the transport is closed";
    return region;
  }

  std::shared_ptr<Endpoint> open() override {
    auto endpoint =
        std::make_shared<ucx::UcxEndpoint>(ucx::UcxHome{shared_from_this(), server_.get(), ender_.get()});
    if (!endpoints_.add(endpoint)) endpoint->close();
    return endpoint;
  }

  std::string accept(std::string_view remote, std::string* error) override {
    ucx::EndpointBlob reader;
    if (!from_blob(remote, ucx::kEndpointMagic, &reader, error)) return {};
    if (remote.size() != sizeof reader + reader.address_nbytes) {
      *error = "handshake is malformed";
      return {};
    }
    // The owner's half of an endpoint is its token alone: nothing to keep until the reader connects.
    return ucx::make_blob(*server_, server_->tokens().new_grant());
  }

  void close() override {
    if (getpid() != pid_) return;  // in a forked child all of it is the parent's
    const std::lock_guard closing(closing_);
    endpoints_.close();
    ender_->close();
    // Before the regions: their close would wait for sends that only this ends.
    if (server_) server_->close();
    regions_->close();
  }

 private:
  std::string domain_;
  const std::shared_ptr<RegionTable> regions_ = std::make_shared<RegionTable>();
  ThreadOwner<ucx::Server> server_;
  const ThreadOwner<ucx::LineEnder> ender_{new ucx::LineEnder};
  EndpointList endpoints_;
  const pid_t pid_ = getpid();
  std::mutex closing_;  // held by the one close() that does the work, so that the others return after it
};

}  // namespace

std::string ucx_missing(const std::string& library) {
  std::string error;
  ucx::Api::load(library, &error);
  return error;
}

UcxLibrary ucx_library() {
  return {ucx::Api::path(), ucx::Api::version()};
}

std::vector<std::string> ucx_resources(const UcxOptions& options, std::string* error) {
  ucx::Address address;
  const auto context = open_context(options, &address, error);
  return context ? ucx::find_resources(*context) : std::vector<std::string>();
}

std::shared_ptr<Transport> make_ucx_transport(const UcxOptions& options, std::string* error) {
  return UcxTransport::start(options, error);
}

}  // namespace p2pkv
