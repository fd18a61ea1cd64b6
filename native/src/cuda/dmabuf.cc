#include "cuda/dmabuf.h"

#include <unistd.h>

#include "base/checked.h"
#include "cuda/memory_calls.h"

namespace p2pkv::cuda {
namespace {

constexpr int kRangeIsDmabuf = 1;  // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

}  // namespace

bool export_dmabuf(Device& device, uint64_t address, uint64_t nbytes, DmabufWay way, Dmabuf* exported,
                   std::string* error) {
  DeviceRange whole;
  if (!find_device_range(address, &whole) || whole.nbytes == 0) {
    *error = "the driver does not tell which allocation this memory is of";
    return false;
  }
  if (!lies_within(address - whole.start, nbytes, whole.nbytes)) {
    *error = "it consists of several allocations, of which the first has " + std::to_string(whole.nbytes) +
             " bytes";
    return false;
  }
  const auto range_handle = MemoryCalls::get().range_handle;
  if (range_handle == nullptr) {
    *error = "the CUDA driver has no cuMemGetHandleForAddressRange; one of CUDA 11.7 or newer is needed";
    return false;
  }
  // The driver takes whole pages of the host's, whatever the allocation's size is.
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t begin = whole.start / page * page;
  const uint64_t end = (whole.start + whole.nbytes + page - 1) / page * page;
  int fd = -1;
  Result result = kSuccess;
  const auto get = [&] {
    result = range_handle(&fd, begin, end - begin, kRangeIsDmabuf, static_cast<uint64_t>(way));
  };
  if (!device.run_inside(get, error) || !succeeded("cuMemGetHandleForAddressRange", result, error))
    return false;
  *exported = {UniqueFd(fd), address - begin};
  return true;
}

}  // namespace p2pkv::cuda
