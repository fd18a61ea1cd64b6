#include "cuda/driver.h"

#include <dlfcn.h>

#include <mutex>

#include "cuda/device.h"

namespace p2pkv::cuda {
namespace {

std::mutex loading;  // guards all below
std::string library_name = "libcuda.so.1";
void* opened = nullptr;
Driver driver;
bool is_bound = false;
bool is_initialized = false;

template <typename Function>
bool find(void* library, const char* name, Function* out, std::string* error) {
  *out = reinterpret_cast<Function>(dlsym(library, name));
  if (*out != nullptr) return true;
  *error = library_name + " has no " + name + "; a driver of CUDA 11 or newer is needed";
  return false;
}

bool find_all(void* library, std::string* error) {
  return find(library, "cuInit", &driver.init, error) &&
         find(library, "cuDriverGetVersion", &driver.driver_get_version, error) &&
         find(library, "cuDeviceGetCount", &driver.device_get_count, error) &&
         find(library, "cuDeviceGet", &driver.device_get, error) &&
         find(library, "cuDeviceGetName", &driver.device_get_name, error) &&
         find(library, "cuPointerGetAttributes", &driver.pointer_get_attributes, error) &&
         find(library, "cuDevicePrimaryCtxRetain", &driver.primary_context_retain, error) &&
         find(library, "cuDevicePrimaryCtxRelease_v2", &driver.primary_context_release, error) &&
         find(library, "cuCtxPushCurrent_v2", &driver.context_push, error) &&
         find(library, "cuCtxPopCurrent_v2", &driver.context_pop, error) &&
         find(library, "cuThreadExchangeStreamCaptureMode", &driver.exchange_capture_mode, error) &&
         find(library, "cuMemHostRegister_v2", &driver.host_register, error) &&
         find(library, "cuMemHostUnregister", &driver.host_unregister, error) &&
         find(library, "cuMemHostGetDevicePointer_v2", &driver.host_get_device_pointer, error) &&
         find(library, "cuStreamCreate", &driver.stream_create, error) &&
         find(library, "cuStreamDestroy_v2", &driver.stream_destroy, error) &&
         find(library, "cuStreamGetCtx", &driver.stream_get_context, error) &&
         find(library, "cuMemcpyHtoDAsync_v2", &driver.copy_to_device, error) &&
         find(library, "cuMemcpyDtoHAsync_v2", &driver.copy_to_host, error) &&
         find(library, "cuMemcpyDtoDAsync_v2", &driver.copy_on_devices, error) &&
         find(library, "cuEventCreate", &driver.event_create, error) &&
         find(library, "cuEventRecord", &driver.event_record, error) &&
         find(library, "cuEventQuery", &driver.event_query, error) &&
         find(library, "cuEventDestroy_v2", &driver.event_destroy, error) &&
         find(library, "cuGetErrorName", &driver.get_error_name, error) &&
         find(library, "cuGetErrorString", &driver.get_error_string, error);
}

template <typename Function>
void find_if_there(void* library, const char* name, Function* out) {
  *out = reinterpret_cast<Function>(dlsym(library, name));
}

// A call as it was in a version of CUDA; null in drivers that don't have it so.
template <typename Function>
void find_version(void* library, const char* name, int version, Function* out) {
  using GetAddress = Result (*)(const char* name, void** function, int version, uint64_t flags, int* status);
  const auto get_address = reinterpret_cast<GetAddress>(dlsym(library, "cuGetProcAddress_v2"));
  void* found = nullptr;
  int status = 0;  // not 0: there is no such call, or not in this version
  const bool is_there = get_address != nullptr && get_address(name, &found, version, 0, &status) == kSuccess;
  *out = is_there && status == 0 ? reinterpret_cast<Function>(found) : nullptr;
}

// With the lock. The library is never closed: its threads outlive every use of it.
bool bind(int flags, std::string* error) {
  if (is_bound) return true;
  void* library = dlopen(library_name.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
  if (library == nullptr) {
    // without RTLD_NOLOAD there is a reason, which matters if the library is there and does not fit
    const char* reason = dlerror();
    *error = library_name + " can't be loaded: " + (reason ? reason : "it is not in use") +
             "; it comes with NVIDIA's driver, and a container needs its runtime (--gpus)";
    return false;
  }
  is_bound = find_all(library, error);
  find_version(library, "cuMemcpyBatchAsync", kBatchesSince, &driver.copy_batch);
  find_if_there(library, "cuDeviceGetAttribute", &driver.device_get_attribute);
  find_if_there(library, "cuDeviceGetUuid", &driver.device_get_uuid);
  find_if_there(library, "cuDeviceGetUuid_v2", &driver.device_get_part_uuid);
  find_if_there(library, "cuModuleLoadData", &driver.module_load_data);
  find_if_there(library, "cuModuleUnload", &driver.module_unload);
  find_if_there(library, "cuModuleGetFunction", &driver.module_get_function);
  find_if_there(library, "cuLaunchKernel", &driver.launch_kernel);
  opened = library;
  return is_bound;
}

}  // namespace

bool use_library(const std::string& name, std::string* error) {
  const std::lock_guard lock(loading);
  if (is_bound && name != library_name) {
    *error = "this process has loaded " + library_name + " already, and one driver is all it can use";
    return false;
  }
  library_name = name;
  return true;
}

const Driver* Driver::get(std::string* error) {
  const std::lock_guard lock(loading);
  if (!bind(0, error)) return nullptr;
  if (!is_initialized) {
    const Result result = driver.init(0);
    if (result != kSuccess) {
      *error = driver.describe("cuInit", result) + "; does nvidia-smi work here?";
      return nullptr;
    }
    is_initialized = true;
  }
  return &driver;
}

const Driver* Driver::get_if_loaded() {
  const std::lock_guard lock(loading);
  std::string error;
  return bind(RTLD_NOLOAD, &error) ? &driver : nullptr;
}

void* Driver::find_call(const char* name) {
  const std::lock_guard lock(loading);
  return is_bound ? dlsym(opened, name) : nullptr;
}

std::string Driver::describe(const char* call, Result error) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (get_error_name(error, &name) != kSuccess || name == nullptr) {
    return std::string(call) + ": error " + std::to_string(error);
  }
  get_error_string(error, &text);
  return std::string(call) + ": " + name + (text != nullptr ? " (" + std::string(text) + ")" : "");
}

CurrentContext::CurrentContext(const Driver& driver, ContextHandle context) : driver_(driver) {
  result_ = driver_.context_push(context);
  if (result_ == kSuccess) driver_.exchange_capture_mode(&capture_mode_);
}

CurrentContext::~CurrentContext() {
  if (result_ != kSuccess) return;
  driver_.exchange_capture_mode(&capture_mode_);
  ContextHandle popped;
  driver_.context_pop(&popped);
}

}  // namespace p2pkv::cuda
