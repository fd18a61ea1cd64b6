#include "cuda/own_memory.h"

#include <unistd.h>

#include <utility>

#include "cuda/dmabuf.h"
#include "cuda/memory_calls.h"

namespace p2pkv::cuda {
namespace {

constexpr int kAllocationIsPinned = 1;  // CU_MEM_ALLOCATION_TYPE_PINNED
constexpr int kMinimum = 0;             // CU_MEM_ALLOC_GRANULARITY_MINIMUM

// What both kinds have in common: they are made and freed within the device's context, by whoever made them.
class Allocation : public OwnMemory {
 public:
  Allocation(std::shared_ptr<Device> device, uint64_t nbytes) : device_(std::move(device)), nbytes_(nbytes) {}

  uint64_t address() const override { return address_; }

  UniqueFd export_dmabuf(std::string* error) override {
    Dmabuf exported;
    cuda::export_dmabuf(*device_, address_, nbytes_, DmabufWay::kAsItIs, &exported, error);
    return std::move(exported.fd);
  }

 protected:
  template <typename Free>
  void free_inside(const Free& free) {
    std::string ignored;
    if (getpid() == pid_ && address_ != 0) device_->run_inside(free, &ignored);
  }

  const std::shared_ptr<Device> device_;
  uint64_t nbytes_;
  DevicePointer address_ = 0;

 private:
  const pid_t pid_ = getpid();
};

class OwnByHandle final : public Allocation {
 public:
  using Allocation::Allocation;
  ~OwnByHandle() override {
    free_inside([this] { MemoryCalls::get().free(address_); });
  }

  // Within the device's context.
  bool allocate(std::string* error) {
    return succeeded("cuMemAlloc", MemoryCalls::get().allocate(&address_, nbytes_), error);
  }
};

class OwnByDescriptor final : public Allocation {
 public:
  using Allocation::Allocation;
  ~OwnByDescriptor() override {
    free_inside([this] {
      if (is_mapped_) MemoryCalls::get().unmap(address_, nbytes_);
      MemoryCalls::get().unreserve(address_, nbytes_);
    });
  }

  // Within the device's context.
  bool allocate(std::string* error) {
    const MemoryCalls& calls = MemoryCalls::get();
    const AllocationProperties properties{
        kAllocationIsPinned, kHandleIsDescriptor, kLocationIsDevice, device_->ordinal(), nullptr, {}};
    size_t granule = 0;
    if (!succeeded("cuMemGetAllocationGranularity", calls.granularity(&granule, &properties, kMinimum),
                   error))
      return false;
    nbytes_ = (nbytes_ + granule - 1) / granule * granule;
    MemoryHandle handle;
    if (!succeeded("cuMemCreate", calls.create(&handle, nbytes_, &properties, 0), error)) return false;
    Result result = calls.reserve(&address_, nbytes_, 0, 0, 0);
    if (result == kSuccess) {
      result = calls.map(address_, nbytes_, 0, handle, 0);
      is_mapped_ = result == kSuccess;
    }
    calls.release(handle);  // the mapping keeps the memory
    if (!succeeded("cuMemMap", result, error)) return false;
    const AccessDescription access{kLocationIsDevice, device_->ordinal(), kMayReadAndWrite};
    return succeeded("cuMemSetAccess", calls.set_access(address_, nbytes_, &access, 1), error);
  }

 private:
  bool is_mapped_ = false;
};

template <typename Memory>
std::unique_ptr<OwnMemory> make(std::shared_ptr<Device> device, uint64_t nbytes, std::string* error) {
  Device& context = *device;
  auto made = std::make_unique<Memory>(std::move(device), nbytes);
  bool is_there = false;
  if (!context.run_inside([&] { is_there = made->allocate(error); }, error) || !is_there) return nullptr;
  return made;
}

}  // namespace

std::unique_ptr<OwnMemory> OwnMemory::allocate(std::shared_ptr<Device> device, uint64_t nbytes, Kind kind,
                                               std::string* error) {
  return kind == Kind::kByHandle ? make<OwnByHandle>(std::move(device), nbytes, error)
                                 : make<OwnByDescriptor>(std::move(device), nbytes, error);
}

}  // namespace p2pkv::cuda
