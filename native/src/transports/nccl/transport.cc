// The nccl transport: puts the owner's and the reader's side together.
#include <unistd.h>

#include "net/tokens.h"
#include "transports/nccl/memory.h"
#include "transports/nccl/reader.h"
#include "transports/nccl/server.h"
#include "transports/transports.h"

namespace p2pkv {
namespace {

class NcclTransport final : public Transport {
 public:
  static std::shared_ptr<NcclTransport> start(const NcclOptions& options, std::string* error) {
    auto device = cuda::Device::open(options.device, error);
    if (!device) return nullptr;
    auto transport = std::make_shared<NcclTransport>(std::move(device), options);
    transport->server_.reset(
        nccl::Server::start(options.listen, &transport->means_, transport->regions_, error).release());
    return transport->server_ ? transport : nullptr;
  }

  NcclTransport(std::shared_ptr<cuda::Device> device, const NcclOptions& options)
      : means_{std::move(device), {options.channels}, nccl::Budget(options.communicators)} {
    fill_random(instance_.data(), instance_.size());
  }
  ~NcclTransport() override { close(); }

  // Ranks of one communicator must have the same NCCL.
  std::string domain() const override { return "nccl:" + nccl::version_text(nccl::Api::version()); }

  std::shared_ptr<MemoryRegion> register_memory(uint8_t* base, uint64_t nbytes, int, bool readable,
                                                std::string* error) override {
    std::shared_ptr<void> locked;
    if (readable && !(locked = lock_memory(base, nbytes, error))) return nullptr;
    RegisteredRegion::Options options{base, nbytes, UniqueFd(), readable, nccl::kRegionMagic, {}};
    options.registration = std::move(locked);
    auto region = regions_->add(std::move(options));
    if (!region) *error = "the transport is closed";
    return region;
  }

  std::shared_ptr<Endpoint> open() override {
    auto endpoint = std::make_shared<nccl::NcclEndpoint>(
        nccl::NcclHome{shared_from_this(), &means_, server_.get(), &lines_, &instance_});
    if (!endpoints_.add(endpoint)) endpoint->close();
    return endpoint;
  }

  std::string accept(std::string_view remote, std::string* error) override {
    nccl::EndpointBlob reader;
    if (!from_blob(remote, nccl::kEndpointMagic, &reader, error)) return {};
    // The owner's half of an endpoint is its door alone: nothing to keep until the reader connects.
    return server_->make_half(instance_, error);
  }

  void close() override {
    if (getpid() != pid_) return;  // in a forked child all of it is the parent's
    const std::lock_guard closing(closing_);
    endpoints_.close();
    lines_.close();
    // Before the regions: their close would wait for sends that only this ends.
    if (server_) server_->close();
    regions_->close();
    const std::lock_guard lock(mutex_);
    means_.device.reset();  // with its streams, unless somebody else uses it
  }

 private:
  std::shared_ptr<void> lock_memory(uint8_t* base, uint64_t nbytes, std::string* error) {
    std::shared_ptr<cuda::Device> device;
    {
      const std::lock_guard lock(mutex_);
      device = means_.device;
    }
    if (device) return nccl::LockedMemory::lock(std::move(device), base, nbytes, error);
    *error = "the transport is closed";
    return nullptr;
  }

  std::mutex mutex_;  // guards the end of means_.device; lines and sessions are over by then
  nccl::Means means_;
  nccl::Instance instance_;
  const std::shared_ptr<RegionTable> regions_ = std::make_shared<RegionTable>();
  nccl::LineBook lines_;
  ThreadOwner<nccl::Server> server_;
  EndpointList endpoints_;
  const pid_t pid_ = getpid();
  std::mutex closing_;  // held by the one close() that does the work, so that the others return after it
};

}  // namespace

std::string nccl_missing(const std::string& library) {
  std::string error;
  nccl::Api::load(library, &error);
  return error;
}

NcclLibrary nccl_library() {
  return {nccl::Api::path(), nccl::Api::version() == 0 ? "" : nccl::version_text(nccl::Api::version())};
}

std::shared_ptr<Transport> make_nccl_transport(const NcclOptions& options, std::string* error) {
  return NcclTransport::start(options, error);
}

}  // namespace p2pkv
