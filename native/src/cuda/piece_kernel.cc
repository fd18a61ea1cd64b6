#include "cuda/piece_kernel.h"

#include <algorithm>
#include <type_traits>

#include "cuda/piece_kernel_text.h"

namespace p2pkv::cuda {
namespace {

// One warp copies so much at a time: it is small enough that all of them have some of a page, and large
// enough that to learn of it costs little.
constexpr uint64_t kSlice = 8 << 10;
constexpr size_t kFew = std::extent_v<decltype(FewSlices::of)>;
constexpr size_t kMany = std::extent_v<decltype(ManySlices::of)>;

}  // namespace

bool PieceKernel::lend(DeviceHandle device, unsigned n_blocks, std::string* error) {
  const std::lock_guard lock(loading_);
  if (n_blocks <= n_blocks_) return true;
  if (module_ == nullptr && load(device, error) != kSuccess) return false;
  n_blocks_ = n_blocks;
  return true;
}

Result PieceKernel::load(DeviceHandle device, std::string* error) {
  const auto fail = [&](const char* call, Result result) {
    *error = driver_.describe(call, result);
    return result;
  };
  if (!driver_.has_kernels()) return fail("finding cuLaunchKernel and what belongs to it", kNotSupported);
  int is_same_address = 0;  // page-locked memory is to the device where it is to the processor
  Result result = driver_.device_get_attribute(&is_same_address, kAttributeUsesHostPointers, device);
  if (result == kSuccess && is_same_address == 0) result = kNotSupported;
  if (result != kSuccess) return fail("addressing page-locked memory as the processor does", result);
  result = driver_.module_load_data(&module_, piece_kernel_text().c_str());
  if (result != kSuccess) {
    module_ = nullptr;  // whatever the driver has left there
    return fail("cuModuleLoadData", result);
  }
  result = driver_.module_get_function(&few_, module_, kFewSlicesKernel);
  if (result == kSuccess) result = driver_.module_get_function(&many_, module_, kManySlicesKernel);
  if (result == kSuccess) return result;
  driver_.module_unload(module_);
  module_ = nullptr;
  return fail("cuModuleGetFunction", result);
}

void PieceKernel::end() {
  const std::lock_guard lock(loading_);
  n_blocks_ = 0;
  if (module_ != nullptr) driver_.module_unload(module_);
  module_ = nullptr;
}

// It launches what has been cut, few slices first: the device is at work while the others are being cut.
Result PieceKernel::launch(std::span<const InnerCopy> copies, StreamHandle stream) {
  std::vector<InnerCopy> slices;
  slices.reserve(kMany);
  size_t most = kFew;
  const auto launch_cut = [&] {
    const Result result = slices.size() <= kFew ? launch_some<FewSlices>(slices, few_, stream)
                                                : launch_some<ManySlices>(slices, many_, stream);
    slices.clear();
    most = kMany;
    return result;
  };
  for (InnerCopy copy : copies) {
    while (copy.nbytes > 0) {
      const uint64_t n = std::min(copy.nbytes, kSlice);
      slices.push_back({copy.to, copy.from, n});
      copy = {copy.to + n, copy.from + n, copy.nbytes - n};
      if (slices.size() < most) continue;
      if (const Result result = launch_cut(); result != kSuccess) return result;
    }
  }
  return slices.empty() ? kSuccess : launch_cut();
}

template <typename Parameters>
Result PieceKernel::launch_some(std::span<const InnerCopy> slices, FunctionHandle function,
                                StreamHandle stream) {
  Parameters parameters;
  parameters.n = slices.size();
  std::copy(slices.begin(), slices.end(), parameters.of);
  void* pointers[] = {&parameters};
  constexpr size_t kWarps = kKernelThreads / kWarp;  // of a block
  const size_t n_busy = (slices.size() + kWarps - 1) / kWarps;
  const auto n_blocks = static_cast<unsigned>(std::min<size_t>(n_blocks_, n_busy));
  return driver_.launch_kernel(function, n_blocks, 1, 1, kKernelThreads, 1, 1, 0, stream, pointers, nullptr);
}

}  // namespace p2pkv::cuda
