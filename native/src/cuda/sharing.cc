#include "cuda/sharing.h"

#include <unistd.h>

#include <cstring>
#include <utility>

#include "base/checked.h"
#include "cuda/memory_calls.h"

namespace p2pkv::cuda {
namespace {

constexpr uint32_t kByHandle = 1;
constexpr uint32_t kByDescriptor = 2;
constexpr unsigned kEnablePeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

class MappedByHandle final : public MappedMemory {
 public:
  MappedByHandle(std::shared_ptr<Device> device, uint64_t offset)
      : device_(std::move(device)), offset_(offset) {}
  ~MappedByHandle() override {
    std::string ignored;
    if (getpid() == pid_ && base_ != 0)
      device_->run_inside([&] { MemoryCalls::get().ipc_close(base_); }, &ignored);
  }
  uint64_t address() const override { return base_ + offset_; }

  // Within the device's context.
  bool open(const SharedRange& range, uint64_t nbytes, std::string* error) {
    IpcHandle handle;
    static_assert(sizeof handle.bytes == sizeof range.handle);
    std::memcpy(handle.bytes, range.handle.data(), sizeof handle.bytes);
    const Result result = MemoryCalls::get().ipc_open(&base_, handle, kEnablePeerAccess);
    if (!succeeded("cuIpcOpenMemHandle", result, error)) return false;
    DeviceRange real;
    const bool is_known = find_device_range(base_, &real) && real.nbytes > 0;
    if (!is_known || lies_within(offset_, nbytes, real.nbytes)) return true;
    *error = "the peer's memory is smaller than it says";
    return false;
  }

 private:
  const std::shared_ptr<Device> device_;
  const uint64_t offset_;
  const pid_t pid_ = getpid();
  DevicePointer base_ = 0;
};

class MappedByDescriptor final : public MappedMemory {
 public:
  MappedByDescriptor(std::shared_ptr<Device> device, const SharedRange& range)
      : device_(std::move(device)), offset_(range.offset), nbytes_(range.allocation_nbytes) {}
  ~MappedByDescriptor() override {
    std::string ignored;
    if (getpid() == pid_ && base_ != 0) device_->run_inside([&] { close(); }, &ignored);
  }
  uint64_t address() const override { return base_ + offset_; }

  // Within the device's context.
  bool open(int fd, std::string* error) {
    const MemoryCalls& calls = MemoryCalls::get();
    MemoryHandle handle;
    auto* const shareable = reinterpret_cast<void*>(static_cast<uintptr_t>(fd));
    Result result = calls.import_handle(&handle, shareable, kHandleIsDescriptor);
    if (!succeeded("cuMemImportFromShareableHandle", result, error)) return false;
    result = calls.reserve(&base_, nbytes_, 0, 0, 0);
    if (result == kSuccess) {
      result = calls.map(base_, nbytes_, 0, handle, 0);
      is_mapped_ = result == kSuccess;
    }
    calls.release(handle);  // the mapping keeps the memory
    if (!succeeded("cuMemMap", result, error)) return false;
    // Not every driver has mappings that can't be written to.
    for (const int flags : {kMayRead, kMayReadAndWrite}) {
      const AccessDescription access{kLocationIsDevice, device_->ordinal(), flags};
      result = calls.set_access(base_, nbytes_, &access, 1);
      if (result == kSuccess) return true;
    }
    return succeeded("cuMemSetAccess", result, error);
  }

 private:
  void close() const {
    if (is_mapped_) MemoryCalls::get().unmap(base_, nbytes_);
    MemoryCalls::get().unreserve(base_, nbytes_);
  }

  const std::shared_ptr<Device> device_;
  const uint64_t offset_;
  const uint64_t nbytes_;
  const pid_t pid_ = getpid();
  DevicePointer base_ = 0;
  bool is_mapped_ = false;
};

// Within the device's context. The descriptor, if the memory is of the second kind.
bool export_descriptor(uint64_t start, bool* is_second_kind, UniqueFd* fd, std::string* error) {
  const MemoryCalls& calls = MemoryCalls::get();
  MemoryHandle handle;
  *is_second_kind = calls.retain(&handle, reinterpret_cast<void*>(start)) == kSuccess;
  if (!*is_second_kind) return true;
  int exported = -1;
  const Result result = calls.export_handle(&exported, handle, kHandleIsDescriptor, 0);
  calls.release(handle);
  if (!succeeded("cuMemExportToShareableHandle", result, error)) return false;
  *fd = UniqueFd(exported);
  return true;
}

}  // namespace

std::string sharing_missing() {
  std::string error;
  return Driver::get(&error) == nullptr ? error : MemoryCalls::get().missing;
}

bool share_memory(Device& device, uint64_t address, uint64_t nbytes, SharedRange* range, UniqueFd* fd,
                  std::string* error) {
  DeviceRange whole;
  if (!find_device_range(address, &whole) || whole.nbytes == 0) {
    *error = "the driver does not tell which allocation this memory is of";
    return false;
  }
  *range = {kByHandle, 0, whole.nbytes, address - whole.start, {}};
  if (!lies_within(range->offset, nbytes, whole.nbytes)) {
    *error = "it consists of several allocations, of which the first has " + std::to_string(whole.nbytes) +
             " bytes";
    return false;
  }
  bool is_shared = false;
  const auto share = [&] {
    bool is_second_kind;
    if (!export_descriptor(whole.start, &is_second_kind, fd, error)) return;
    if (is_second_kind) range->kind = kByDescriptor;
    IpcHandle handle{};
    is_shared = is_second_kind ||
                succeeded("cuIpcGetMemHandle", MemoryCalls::get().ipc_get(&handle, whole.start), error);
    if (!is_second_kind) std::memcpy(range->handle.data(), handle.bytes, sizeof handle.bytes);
  };
  return device.run_inside(share, error) && is_shared;
}

std::unique_ptr<MappedMemory> MappedMemory::map(std::shared_ptr<Device> device, const SharedRange& range,
                                                int fd, uint64_t nbytes, std::string* error) {
  const bool is_by_descriptor = range.kind == kByDescriptor && fd >= 0;
  if ((range.kind != kByHandle && !is_by_descriptor) ||
      !lies_within(range.offset, nbytes, range.allocation_nbytes)) {
    *error = "the peer's memory can't be of this kind or extent";
    return nullptr;
  }
  Device& context = *device;
  std::unique_ptr<MappedMemory> mapped;
  bool is_open = false;
  const auto open = [&] {
    if (is_by_descriptor) {
      auto made = std::make_unique<MappedByDescriptor>(std::move(device), range);
      is_open = made->open(fd, error);
      mapped = std::move(made);
    } else {
      auto made = std::make_unique<MappedByHandle>(std::move(device), range.offset);
      is_open = made->open(range, nbytes, error);
      mapped = std::move(made);
    }
  };
  if (!context.run_inside(open, error) || !is_open) return nullptr;
  DeviceRange real;
  const bool is_own = find_device_range(mapped->address(), &real) && real.device == context.ordinal();
  // Memory that was mapped by its handle may be smaller than its owner says: a kernel would break the
  // context.
  const bool is_whole =
      is_by_descriptor || (is_own && lies_within(mapped->address() - real.start, nbytes, real.nbytes));
  if (is_own && is_whole) mapped->memory_ = InnerMemory::kOwn;
  return mapped;
}

}  // namespace p2pkv::cuda
