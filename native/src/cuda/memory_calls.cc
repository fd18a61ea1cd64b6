#include "cuda/memory_calls.h"

namespace p2pkv::cuda {
namespace {

template <typename Function>
void find(const char* name, Function* out, std::string* missing) {
  *out = reinterpret_cast<Function>(Driver::find_call(name));
  if (*out == nullptr && missing->empty())
    *missing = std::string("the CUDA driver has no ") + name + "; one of CUDA 11 or newer is needed";
}

MemoryCalls find_all() {
  MemoryCalls calls{};
  std::string* const missing = &calls.missing;
  find("cuIpcGetMemHandle", &calls.ipc_get, missing);
  find("cuIpcOpenMemHandle_v2", &calls.ipc_open, missing);
  find("cuIpcCloseMemHandle", &calls.ipc_close, missing);
  find("cuMemRetainAllocationHandle", &calls.retain, missing);
  find("cuMemRelease", &calls.release, missing);
  find("cuMemExportToShareableHandle", &calls.export_handle, missing);
  find("cuMemImportFromShareableHandle", &calls.import_handle, missing);
  find("cuMemAddressReserve", &calls.reserve, missing);
  find("cuMemAddressFree", &calls.unreserve, missing);
  find("cuMemMap", &calls.map, missing);
  find("cuMemUnmap", &calls.unmap, missing);
  find("cuMemSetAccess", &calls.set_access, missing);
  find("cuMemAlloc_v2", &calls.allocate, missing);
  find("cuMemFree_v2", &calls.free, missing);
  find("cuMemGetAllocationGranularity", &calls.granularity, missing);
  find("cuMemCreate", &calls.create, missing);
  std::string ignored;
  find("cuMemGetHandleForAddressRange", &calls.range_handle, &ignored);
  return calls;
}

}  // namespace

const MemoryCalls& MemoryCalls::get() {
  static const MemoryCalls calls = find_all();
  return calls;
}

bool succeeded(const char* call, Result result, std::string* error) {
  std::string ignored;
  if (result != kSuccess) *error = Driver::get(&ignored)->describe(call, result);
  return result == kSuccess;
}

}  // namespace p2pkv::cuda
