// Kernels of the emulated driver. It compiles nothing: a kernel's name says what it does, and its text how
// many bytes of parameters it takes. It knows p2pkv's two, which copy slices
// (native/src/cuda/piece_kernel_text.h).
#include <cstring>
#include <map>
#include <string>

#include "machine.h"

using namespace fake;

struct CUfunc_st {
  size_t nbytes;  // of its parameters
};
struct CUmod_st {
  std::map<std::string, CUfunc_st> functions;
};

namespace {

constexpr int kInvalidText = 218;  // CUDA_ERROR_INVALID_PTX
constexpr int kHostPointers = 91;  // CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
constexpr uint64_t kAlignment = 16;

struct Slice {
  uint64_t to;
  uint64_t from;
  uint64_t nbytes;
};

}  // namespace

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  if (const int result = asked_for("cuDeviceGetAttribute")) return result;
  if (attribute != kHostPointers) return kInvalidValue;
  *value = 1;
  return kSuccess;
}

EXPORT int cuModuleLoadData(CUmod_st** module, const void* image) {
  Context* context;
  if (const int result = check("cuModuleLoadData", &context)) return result;
  const std::string text = static_cast<const char*>(image);
  if (text.find(".version ") == std::string::npos || text.find(".target ") == std::string::npos)
    return kInvalidText;
  auto made = std::make_unique<CUmod_st>();
  const std::string entry = ".entry ";
  for (size_t at = text.find(entry); at != std::string::npos; at = text.find(entry, at)) {
    at += entry.size();
    const size_t bracket = text.find('[', at);
    made->functions[text.substr(at, text.find('(', at) - at)] = {std::stoul(text.substr(bracket + 1))};
  }
  *module = made.release();
  const Lock lock(machine.mutex);
  ++machine.counts.modules;
  return kSuccess;
}

EXPORT int cuModuleUnload(CUmod_st* module) {
  Context* context;
  if (const int result = check("cuModuleUnload", &context)) return result;
  delete module;
  const Lock lock(machine.mutex);
  --machine.counts.modules;
  return kSuccess;
}

EXPORT int cuModuleGetFunction(CUfunc_st** function, CUmod_st* module, const char* name) {
  if (const int result = asked_for("cuModuleGetFunction")) return result;
  const auto found = module->functions.find(name);
  if (found == module->functions.end()) return kNotFound;
  *function = &found->second;
  return kSuccess;
}

EXPORT int cuLaunchKernel(CUfunc_st* function, unsigned blocks, unsigned, unsigned, unsigned threads,
                          unsigned, unsigned, unsigned, CUstream_st* stream, void** parameters, void**) {
  Context* context;
  if (const int result = check("cuLaunchKernel", &context)) return result;
  uint64_t n = 0;
  std::memcpy(&n, parameters[0], sizeof n);
  if (blocks == 0 || threads == 0 || threads > 1024 || threads % 32 != 0) return kInvalidValue;
  if (n > (function->nbytes - sizeof n) / sizeof(Slice)) return kInvalidValue;
  const auto* slices = reinterpret_cast<const Slice*>(static_cast<const uint8_t*>(parameters[0]) + sizeof n);
  std::vector<Copy> copies;
  bool is_aligned = true;
  for (uint64_t i = 0; i < n; ++i) {
    is_aligned &= (slices[i].to | slices[i].from | slices[i].nbytes) % kAlignment == 0;
    copies.push_back({slices[i].to, slices[i].from, slices[i].nbytes});
  }
  size_t failed;
  const int result =
      is_aligned ? launch("cuLaunchKernel", std::move(copies), stream, &failed) : kInvalidValue;
  if (result == kInvalidValue)
    fake_cuda_lose(context->device);  // an address that nothing is at, or a crooked one
  const Lock lock(machine.mutex);
  machine.counts.kernel_slices += static_cast<int64_t>(n);
  return result == kInvalidValue ? kSuccess : result;  // what a kernel does wrong is seen later
}
