// The shm transport: puts the owner's and the reader's side together.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "transports/batch_endpoint.h"
#include "transports/shm/frames.h"
#include "transports/shm/mappings.h"
#include "transports/shm/reader.h"
#include "transports/shm/server.h"
#include "transports/transports.h"

namespace p2pkv {
namespace {

class ShmTransport final : public Transport {
 public:
  static std::shared_ptr<ShmTransport> start(std::string* error) {
    auto transport = std::make_shared<ShmTransport>();
    transport->domain_ = domain_of_host("shm", error);
    if (transport->domain_.empty()) return nullptr;
    transport->server_.reset(shm::start_server(transport->regions_, error).release());
    return transport->server_ && transport->mappings_->start(error) ? transport : nullptr;
  }
  ~ShmTransport() override { close(); }

  std::string domain() const override { return domain_; }

  std::shared_ptr<MemoryRegion> register_memory(uint8_t* base, uint64_t nbytes, int fd, bool readable,
                                                std::string* error) override {
    RegisteredRegion::Options options{base, nbytes, UniqueFd(), readable, shm::kRegionMagic, {}};
    if (readable) {
      options.fd = duplicate(fd, nbytes, error);
      if (!options.fd) return nullptr;
      options.on_closed = [home = weak_from_this()](uint32_t id) {
        if (const auto transport = std::static_pointer_cast<ShmTransport>(home.lock())) {
          transport->server_->drop_region(id);
        }
      };
    }
    auto region = regions_->add(std::move(options));
    if (!region) *error = "the transport is closed";
    return region;
  }

  std::shared_ptr<Endpoint> open() override {
    auto endpoint =
        std::make_shared<shm::ShmEndpoint>(shm::ShmHome{shared_from_this(), server_.get(), mappings_.get()});
    if (!endpoints_.add(endpoint)) endpoint->close();
    return endpoint;
  }

  std::string accept(std::string_view remote, std::string* error) override {
    shm::EndpointBlob reader;
    if (!from_blob(remote, shm::kEndpointMagic, &reader, error)) return {};
    // The owner's half of an endpoint is its token alone: nothing to keep until the reader connects.
    const OwnerDoor door = make_door(*server_, server_->tokens().new_grant());
    return to_blob(shm::EndpointBlob{shm::kEndpointMagic, kFrameVersion, 0, door});
  }

  void close() override {
    if (getpid() != pid_) return;  // in a forked child all of it is the parent's
    const std::lock_guard closing(closing_);
    endpoints_.close();
    regions_->close();
    if (server_) server_->close();
    mappings_->close();
  }

 private:
  // A descriptor of our own for the memfd behind a region, so that its owner may close his at any time.
  static UniqueFd duplicate(int fd, uint64_t nbytes, std::string* error) {
    struct stat info{};
    const int seals = fd < 0 ? -1 : fcntl(fd, F_GET_SEALS);
    constexpr int kNeeded = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    if (seals < 0 || (seals & kNeeded) != kNeeded || fstat(fd, &info) != 0 ||
        static_cast<uint64_t>(info.st_size) != nbytes) {
      *error = "shm can only make a whole sealed shared region readable, as p2pkv._native.SharedRegion is";
      return UniqueFd();
    }
    // Where the kernel keeps nobody from writing, readers get a descriptor that can only be read.
    UniqueFd copy = for_readers(fd);
    if (!copy)
      *error = std::string("cannot duplicate the descriptor of shared memory: ") + std::strerror(errno);
    return copy;
  }

  std::string domain_;
  const std::shared_ptr<RegionTable> regions_ = std::make_shared<RegionTable>();
  ThreadOwner<RegionServer> server_;
  const ThreadOwner<shm::Mappings> mappings_{new shm::Mappings};
  EndpointList endpoints_;
  const pid_t pid_ = getpid();
  std::mutex closing_;  // held by the one close() that does the work, so that the others return after it
};

}  // namespace

std::shared_ptr<Transport> make_shm_transport(std::string* error) {
  return ShmTransport::start(error);
}

}  // namespace p2pkv
