// The cuda_ipc transport: puts the owner's and the reader's side together, and an shm transport beside them,
// which has all that lies in host memory.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "transports/cuda_ipc/frames.h"
#include "transports/cuda_ipc/hold.h"
#include "transports/cuda_ipc/memory.h"
#include "transports/cuda_ipc/reader.h"
#include "transports/cuda_ipc/server.h"
#include "transports/transports.h"

namespace p2pkv {
namespace {

// How long memory is waited for that a reader has mapped. One that runs lets go within the copy under way;
// one that is stopped must not hold up its owner for ever.
constexpr double kTakeBack = 1.0;

// Both kinds of memory of one peer: an endpoint of each.
class CudaIpcEndpoint final : public Endpoint {
 public:
  CudaIpcEndpoint(std::shared_ptr<Endpoint> host, std::shared_ptr<cuda_ipc::DeviceEndpoint> device)
      : host_(std::move(host)), device_(std::move(device)) {}
  ~CudaIpcEndpoint() override { close(); }

  std::string describe() override {
    const std::string host = host_->describe();
    std::string half = device_->describe();
    if (host.size() != cuda_ipc::kHostHalfBytes || half.empty()) return {};
    half.replace(offsetof(cuda_ipc::EndpointBlob, host), host.size(), host);
    return half;
  }

  bool bind(std::string_view remote, std::string* error) override {
    cuda_ipc::EndpointBlob blob;
    return from_blob(remote, cuda_ipc::kEndpointMagic, &blob, error) &&
           host_->bind({blob.host.data(), blob.host.size()}, error) && device_->bind(remote, error);
  }

  std::shared_ptr<RemoteRegion> attach(std::string_view region, std::string* error) override {
    RegionBlob blob;
    std::string ignored;
    const bool is_on_device = from_blob(region, cuda_ipc::kRegionMagic, &blob, &ignored);
    return is_on_device ? device_->attach(region, error) : host_->attach(region, error);
  }

  std::shared_ptr<Transfer> read(std::shared_ptr<MemoryRegion> local, std::shared_ptr<RemoteRegion> remote,
                                 std::vector<Span> spans, std::vector<Word> words) override {
    const bool is_on_device = std::dynamic_pointer_cast<cuda_ipc::DeviceRegion>(remote) != nullptr;
    bool is_closed = false;
    if (is_on_device != is_device_memory(local, &is_closed)) {
      // Not from one kind into the other; but what is closed was canceled, whatever it was.
      const Status refusal = is_closed ? Status::kCanceled : Status::kOutOfRange;
      return std::make_shared<SettledTransfer>(std::vector<Status>(spans.size(), refusal));
    }
    Endpoint& endpoint = is_on_device ? static_cast<Endpoint&>(*device_) : *host_;
    return endpoint.read(std::move(local), std::move(remote), std::move(spans), std::move(words));
  }

  Lender* lender() override { return host_->lender(); }

  void close() override {
    host_->close();
    device_->close();
  }

 private:
  static bool is_device_memory(const std::shared_ptr<MemoryRegion>& memory, bool* is_closed) {
    const auto region = std::dynamic_pointer_cast<RegisteredRegion>(memory);
    if (!region) return false;
    const RegisteredRegion::Use use(*region);
    *is_closed = !use;
    return use && cuda_ipc::device_memory_of(*region) != nullptr;
  }

  const std::shared_ptr<Endpoint> host_;
  const std::shared_ptr<cuda_ipc::DeviceEndpoint> device_;
};

class CudaIpcTransport final : public Transport {
 public:
  static std::shared_ptr<CudaIpcTransport> start(std::string* error) {
    *error = cuda::sharing_missing();
    if (!error->empty()) return nullptr;
    auto transport = std::make_shared<CudaIpcTransport>();
    transport->domain_ = domain_of_host("cuda_ipc", error);
    if (transport->domain_.empty()) return nullptr;
    transport->shm_ = make_shm_transport(error);
    if (!transport->shm_) return nullptr;
    transport->server_.reset(cuda_ipc::start_server(transport->regions_, error).release());
    return transport->server_ && transport->hang_ups_->start(error) ? transport : nullptr;
  }
  ~CudaIpcTransport() override { close(); }

  std::string domain() const override { return domain_; }
  bool reads_devices() const override { return true; }

  std::shared_ptr<MemoryRegion> register_memory(uint8_t* base, uint64_t nbytes, int fd, bool readable,
                                                std::string* error) override {
    cuda::DeviceRange range;
    if (!cuda::find_device_range(reinterpret_cast<uint64_t>(base), &range))
      return shm_->register_memory(base, nbytes, fd, readable, error);
    auto memory = std::make_shared<cuda_ipc::DeviceMemory>();
    memory->device = cuda::Device::open(range.device, error);
    if (!memory->device) return nullptr;
    if (readable && !make_readable(base, nbytes, fd, memory.get(), error)) return nullptr;
    RegisteredRegion::Options options{base, nbytes, UniqueFd(), readable, cuda_ipc::kRegionMagic, {}};
    options.registration = std::move(memory);
    if (readable) {
      options.on_closed = [home = weak_from_this()](uint32_t id) {
        const auto transport = std::static_pointer_cast<CudaIpcTransport>(home.lock());
        if (transport) transport->server_->take_back(id, Deadline::after(kTakeBack));
      };
    }
    auto region = regions_->add(std::move(options));
    if (!region) *error = "the transport is closed";
    return region;
  }

  std::shared_ptr<Endpoint> open() override {
    auto device = std::make_shared<cuda_ipc::DeviceEndpoint>(
        cuda_ipc::CudaIpcHome{shared_from_this(), server_.get(), hang_ups_.get()});
    auto endpoint = std::make_shared<CudaIpcEndpoint>(shm_->open(), std::move(device));
    if (!endpoints_.add(endpoint)) endpoint->close();
    return endpoint;
  }

  std::string accept(std::string_view remote, std::string* error) override {
    cuda_ipc::EndpointBlob reader;
    if (!from_blob(remote, cuda_ipc::kEndpointMagic, &reader, error)) return {};
    const std::string host = shm_->accept({reader.host.data(), reader.host.size()}, error);
    if (host.size() != reader.host.size()) return {};
    const OwnerDoor door = make_door(*server_, server_->tokens().new_grant());
    cuda_ipc::EndpointBlob half{cuda_ipc::kEndpointMagic, kFrameVersion, 0, {}, door};
    host.copy(half.host.data(), half.host.size());
    return to_blob(half);
  }

  void close() override {
    if (getpid() != pid_) return;  // in a forked child all of it is the parent's
    const std::lock_guard closing(closing_);
    endpoints_.close();
    regions_->close();  // which waits for readers, so before the server
    if (server_) server_->close();
    hang_ups_->close();
    shm_->close();
  }

 private:
  static bool make_readable(uint8_t* base, uint64_t nbytes, int fd, cuda_ipc::DeviceMemory* memory,
                            std::string* error) {
    if (!cuda::share_memory(*memory->device, reinterpret_cast<uint64_t>(base), nbytes, &memory->range,
                            &memory->fd, error))
      return false;
    if (fd < 0) return true;
    struct stat info{};
    memory->words = UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 3));
    if (memory->words && fstat(fd, &info) == 0) {
      memory->words_nbytes = static_cast<uint64_t>(info.st_size);
      return true;
    }
    *error = std::string("cannot duplicate the descriptor of the words: ") + std::strerror(errno);
    return false;
  }

  std::string domain_;
  std::shared_ptr<Transport> shm_;
  const std::shared_ptr<RegionTable> regions_ = std::make_shared<RegionTable>();
  const ThreadOwner<cuda_ipc::HangUps> hang_ups_{new cuda_ipc::HangUps};
  ThreadOwner<RegionServer> server_;
  EndpointList endpoints_;
  const pid_t pid_ = getpid();
  std::mutex closing_;  // held by the one close() that does the work, so that the others return after it
};

}  // namespace

std::string cuda_ipc_missing() {
  return cuda::sharing_missing();
}

std::string cuda_ipc_refusal() {
  return cuda_ipc::refusal();
}

std::shared_ptr<Transport> make_cuda_ipc_transport(std::string* error) {
  return CudaIpcTransport::start(error);
}

}  // namespace p2pkv
