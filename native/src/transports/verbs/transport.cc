// The verbs transport: puts the owner's and the reader's side together.
#include <unistd.h>

#include "cuda/device.h"
#include "transports/batch_endpoint.h"
#include "transports/transports.h"
#include "transports/verbs/device_memory.h"
#include "transports/verbs/memory.h"
#include "transports/verbs/reader.h"
#include "transports/verbs/server.h"

namespace p2pkv {
namespace {

class VerbsTransport final : public Transport {
 public:
  explicit VerbsTransport(bool reaches_devices) : reaches_devices_(reaches_devices) {}

  static std::shared_ptr<VerbsTransport> start(const VerbsOptions& options, std::string* error) {
    std::vector<verbs::DeviceChoice> choices(options.devices.size());
    for (size_t i = 0; i < choices.size(); ++i) {
      if (!verbs::parse_choice(options.devices[i], &choices[i], error)) return nullptr;
    }
    auto transport = std::make_shared<VerbsTransport>(options.reaches_devices);
    auto& devices_in_use = transport->in_use_;
    devices_in_use.rails = verbs::Rail::open(options.library, choices, error);
    if (devices_in_use.rails.empty()) return nullptr;
    transport->domain_ = "verbs:" + devices_in_use.rails[0]->fabric();
    devices_in_use.connector.reset(new verbs::Connector, DeleteUnlessForked<verbs::Connector>());
    devices_in_use.server = verbs::Server::start(devices_in_use.rails, devices_in_use.connector, error);
    return devices_in_use.server ? transport : nullptr;
  }
  ~VerbsTransport() override { close(); }

  // Who reaches whom within a fabric only connecting can tell.
  std::string domain() const override { return domain_; }
  bool reads_devices() const override { return reaches_devices_; }
  std::vector<RailTotals> rail_totals() const override { return counters_.totals(); }

  std::shared_ptr<MemoryRegion> register_memory(uint8_t* base, uint64_t nbytes, int, bool readable,
                                                std::string* error) override {
    const verbs::Rails rails = in_use().rails;
    if (rails.empty()) {
      *error = "the transport is closed";
      return nullptr;
    }
    auto registration = make_registration(rails, base, nbytes, readable, error);
    if (!registration) return nullptr;
    RegisteredRegion::Options options{base, nbytes, UniqueFd(), readable, verbs::kRegionMagic, {}};
    options.keys = registration->keys();
    options.registration = std::move(registration);
    // A device may be writing there for as long as a peer takes to answer.
    options.on_closing = [home = weak_from_this()](const RegisteredRegion& region) {
      const auto transport = std::static_pointer_cast<VerbsTransport>(home.lock());
      if (!transport) return;
      for (const auto& endpoint : transport->endpoints_.all()) {
        static_cast<BatchEndpoint&>(*endpoint).cancel_reads_into(region);
      }
    };
    auto region = regions_->add(std::move(options));
    if (!region) *error = "the transport is closed";
    return region;
  }

  std::shared_ptr<Endpoint> open() override {
    const InUse now = in_use();
    auto endpoint = std::make_shared<verbs::VerbsEndpoint>(
        verbs::VerbsHome{shared_from_this(), now.rails, now.connector, &book_, &counters_, reaches_devices_});
    if (!endpoints_.add(endpoint)) endpoint->close();
    return endpoint;
  }

  std::string accept(std::string_view remote, std::string* error) override {
    const auto server = in_use().server;
    if (server) return server->accept(remote, error);
    *error = "the transport is closed";
    return {};
  }

  void close() override {
    if (getpid() != pid_) return;  // in a forked child all of it is the parent's
    const std::lock_guard closing(closing_);
    endpoints_.close();
    regions_->close();
    const InUse last = in_use();
    if (last.connector) last.connector->close();
    if (last.server) last.server->close();
    const std::lock_guard lock(mutex_);
    in_use_ = {};
  }

 private:
  // What keeps devices open; gone when the transport is closed.
  struct InUse {
    verbs::Rails rails;
    std::shared_ptr<verbs::Connector> connector;
    std::shared_ptr<verbs::Server> server;
  };
  InUse in_use() {
    const std::lock_guard lock(mutex_);
    return in_use_;
  }

  std::shared_ptr<verbs::Registration> make_registration(const verbs::Rails& rails, uint8_t* base,
                                                         uint64_t nbytes, bool readable, std::string* error) {
    const auto address = reinterpret_cast<uint64_t>(base);
    cuda::DeviceRange range;
    if (reaches_devices_ && cuda::find_device_range(address, &range))
      return verbs::register_device_memory(rails, address, nbytes, readable, error);
    return readable ? verbs::Registration::create(rails, base, nbytes, true, error)
                    : cache_.get(rails, base, nbytes, error);
  }

  const bool reaches_devices_;
  std::string domain_;
  std::mutex mutex_;  // guards in_use_
  InUse in_use_;
  const std::shared_ptr<RegionTable> regions_ = std::make_shared<RegionTable>();
  verbs::RegistrationCache cache_;
  PeerPortsBook book_;
  RailCounters counters_;
  EndpointList endpoints_;
  const pid_t pid_ = getpid();
  std::mutex closing_;  // held by the one close() that does the work, so that the others return after it
};

}  // namespace

bool has_verbs() {
  return true;
}

std::vector<VerbsPort> verbs_ports(const std::string& library, std::string* error) {
  return verbs::Rail::survey(library, error);
}

std::shared_ptr<Transport> make_verbs_transport(const VerbsOptions& options, std::string* error) {
  return VerbsTransport::start(options, error);
}

}  // namespace p2pkv
