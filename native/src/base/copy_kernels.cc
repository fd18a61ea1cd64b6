#include "base/copy_kernels.h"

#include <algorithm>
#include <cstring>

namespace p2pkv {
namespace {

#if defined(P2PKV_TSAN)
__attribute__((no_sanitize("thread"), noinline)) void copy_by_library(void* to, const void* from,
                                                                      size_t nbytes) {
  auto* out = static_cast<volatile unsigned char*>(to);
  const auto* in = static_cast<const volatile unsigned char*>(from);
  for (size_t i = 0; i < nbytes; ++i) out[i] = in[i];
}
#else
void copy_by_library(void* to, const void* from, size_t nbytes) {
  std::memcpy(to, from, nbytes);
}
#endif

constexpr CopyKernel kLibrary{"memcpy", copy_by_library};

std::vector<CopyKernel> all_kernels() {
  std::vector<CopyKernel> kernels{kLibrary};
#if !defined(P2PKV_TSAN)
  for (const CopyKernel& kernel : processor_kernels()) kernels.push_back(kernel);
#endif
  return kernels;
}

}  // namespace

#if !defined(__x86_64__) && !defined(__aarch64__)
std::vector<CopyKernel> processor_kernels() {
  return {};
}
#endif

const CopyKernel& library_kernel() {
  return kLibrary;
}

const std::vector<CopyKernel>& copy_kernels() {
  static const std::vector<CopyKernel> kernels = all_kernels();
  return kernels;
}

const CopyKernel* find_copy_kernel(std::string_view name) {
  const std::vector<CopyKernel>& kernels = copy_kernels();
  const auto found =
      std::ranges::find_if(kernels, [&](const CopyKernel& kernel) { return kernel.name == name; });
  return found == kernels.end() ? nullptr : &*found;
}

}  // namespace p2pkv
