// CUDA's calls, of the emulated machine.
#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "machine.h"

using namespace fake;

namespace {

constexpr uint64_t kPage = 4096;
constexpr unsigned kReadOnly = 8;  // CU_MEMHOSTREGISTER_READ_ONLY

}  // namespace

EXPORT int cuInit(unsigned) {
  if (const int result = asked_for("cuInit")) return result;
  if (machine.devices.empty()) return kNoDevice;
  machine.is_initialized = true;
  return kSuccess;
}

EXPORT int cuDriverGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}

EXPORT int cuPointerGetAttributes(unsigned n, int* attributes, void** data, uint64_t pointer) {
  if (!machine.is_initialized) return kNotInitialized;
  const Lock lock(machine.mutex);
  uint64_t offset = 0;
  const Allocation* allocation = find(pointer, 1, &offset);
  for (unsigned i = 0; i < n; ++i) {
    switch (attributes[i]) {
      case 1:
        *static_cast<Context**>(data[i]) = allocation ? &machine.contexts[allocation->device] : nullptr;
        break;
      case 2:
        *static_cast<unsigned*>(data[i]) = allocation                                       ? 2
                                           : is_locked(reinterpret_cast<void*>(pointer), 1) ? 1
                                                                                            : 0;
        break;
      case 9:
        *static_cast<int*>(data[i]) = allocation ? allocation->device : -2;
        break;
      case 11:
        *static_cast<uint64_t*>(data[i]) = allocation ? pointer - offset : 0;
        break;
      case 12:
        *static_cast<size_t*>(data[i]) = allocation ? allocation->nbytes : 0;
        break;
      default:
        return kInvalidValue;
    }
  }
  return kSuccess;
}

EXPORT int cuDevicePrimaryCtxRetain(Context** context, int device) {
  if (!machine.is_initialized) return kNotInitialized;
  if (!has_device(device)) return kInvalidDevice;
  if (const int result = asked_for("cuDevicePrimaryCtxRetain")) return result;
  const Lock lock(machine.mutex);
  *context = &machine.contexts[device];
  ++machine.contexts[device].n_retained;
  return kSuccess;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
  const Lock lock(machine.mutex);
  if (machine.contexts[device].n_retained == 0) return kInvalidContext;
  --machine.contexts[device].n_retained;
  return kSuccess;
}

EXPORT int cuCtxPushCurrent_v2(Context* context) {
  if (const int result = asked_for("cuCtxPushCurrent")) return result;
  if (context == nullptr || context->n_retained == 0) return kInvalidContext;
  current.push_back(context);
  return kSuccess;
}

EXPORT int cuCtxPopCurrent_v2(Context** context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return kSuccess;
}

EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return kSuccess;
}

EXPORT int cuMemHostRegister_v2(void* host, size_t nbytes, unsigned flags) {
  Context* context;
  if (const int result = check("cuMemHostRegister", &context)) return result;
  // As a real driver does (580.159): what can't be written to has to be said to be read only.
  const auto page = reinterpret_cast<uint64_t>(host) / kPage * kPage;
  const bool is_writable =
      madvise(reinterpret_cast<void*>(page), kPage, MADV_POPULATE_WRITE) == 0 || errno != EINVAL;
  if (!is_writable && (flags & kReadOnly) == 0) return kInvalidValue;
  const Lock lock(machine.mutex);
  if (is_locked(host, 1)) return kAlreadyRegistered;
  machine.locked[reinterpret_cast<uint64_t>(host)] = nbytes;
  machine.counts.locked_bytes += static_cast<int64_t>(nbytes);
  return kSuccess;
}

EXPORT int cuMemHostUnregister(void* host) {
  const Lock lock(machine.mutex);
  const auto found = machine.locked.find(reinterpret_cast<uint64_t>(host));
  if (found == machine.locked.end()) return kNotRegistered;
  machine.counts.locked_bytes -= static_cast<int64_t>(found->second);
  machine.locked.erase(found);
  return kSuccess;
}

EXPORT int cuMemHostGetDevicePointer_v2(uint64_t* pointer, void* host, unsigned) {
  Context* context;
  if (const int result = check("cuMemHostGetDevicePointer", &context)) return result;
  const Lock lock(machine.mutex);
  if (!is_locked(host, 1)) return kInvalidValue;
  *pointer = reinterpret_cast<uint64_t>(host);
  return kSuccess;
}

// Not bound by p2pkv: what the emulated NCCL puts its work on a stream with.
EXPORT int cuLaunchHostFunc(CUstream_st* handle, void (*function)(void*), void* data) {
  const auto stream = stream_of(handle);
  if (!stream) return kInvalidHandle;
  stream->add([function, data] { function(data); });
  return kSuccess;
}

EXPORT int cuStreamCreate(CUstream_st** stream, unsigned) {
  Context* context;
  if (const int result = check("cuStreamCreate", &context)) return result;
  auto made = std::make_shared<CUstream_st>(context);
  const Lock lock(machine.mutex);
  *stream = made.get();
  machine.streams[made.get()] = std::move(made);
  ++machine.counts.streams;
  return kSuccess;
}

EXPORT int cuStreamDestroy_v2(CUstream_st* stream) {
  std::shared_ptr<CUstream_st> dying;  // joins its thread without the lock
  const Lock lock(machine.mutex);
  const auto found = machine.streams.find(stream);
  if (found == machine.streams.end()) return kInvalidHandle;
  dying = std::move(found->second);
  machine.streams.erase(found);
  --machine.counts.streams;
  std::thread([last = std::move(dying)] {}).detach();  // does not wait for the stream's work, as in CUDA
  return kSuccess;
}

EXPORT int cuStreamGetCtx(CUstream_st* handle, Context** context) {
  const auto stream = stream_of(handle);
  if (!stream) return kInvalidHandle;
  *context = stream->context;
  return kSuccess;
}

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t nbytes, CUstream_st* stream) {
  size_t failed;
  return launch("cuMemcpyHtoDAsync", {{to, reinterpret_cast<uint64_t>(from), nbytes}}, stream, &failed);
}

EXPORT int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t nbytes, CUstream_st* stream) {
  size_t failed;
  return launch("cuMemcpyDtoHAsync", {{reinterpret_cast<uint64_t>(to), from, nbytes}}, stream, &failed);
}

EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t nbytes, CUstream_st* stream) {
  size_t failed;
  return launch("cuMemcpyDtoDAsync", {{to, from, nbytes}}, stream, &failed);
}

namespace {

struct CopyAttributes {
  int source_order;
  int source_hint[2];
  int target_hint[2];
  unsigned flags;
};

// As CUDA 12.8 has it. One kind of attributes is enough for all of a batch, and the default streams are
// refused.
int copy_batch(uint64_t* to, uint64_t* from, size_t* nbytes, size_t n, CopyAttributes* attributes,
               size_t* first_of_attributes, size_t n_attributes, size_t* failed, CUstream_st* stream) {
  const bool is_default = reinterpret_cast<uintptr_t>(stream) <= 2;
  if (n == 0 || n_attributes != 1 || first_of_attributes[0] != 0 || attributes->source_order != 1 ||
      attributes->flags > 1 || is_default)
    return kInvalidValue;
  std::vector<Copy> copies;
  for (size_t i = 0; i < n; ++i) {
    if (nbytes[i] == 0) return kInvalidValue;
    copies.push_back({to[i], from[i], nbytes[i]});
  }
  return launch("cuMemcpyBatchAsync", std::move(copies), stream, failed);
}

}  // namespace

// By its bare name it is that of CUDA 13, which lacks an argument: who takes it so is told at once.
EXPORT int cuMemcpyBatchAsync(uint64_t*, uint64_t*, size_t*, size_t, CopyAttributes*, size_t*, size_t,
                              CUstream_st*) {
  abort();
}

EXPORT int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
  *function = nullptr;
  const bool is_known = std::strcmp(name, "cuMemcpyBatchAsync") == 0;
  *status = !is_known ? 1 : version != 12080 ? 2 : 0;
  if (*status == 0) *function = reinterpret_cast<void*>(&copy_batch);
  if (asked_for("cuGetProcAddress") != kSuccess) *status = 1;
  return *status == 1 || flags != 0 ? kNotFound : kSuccess;
}

EXPORT int cuEventCreate(CUevent_st** event, unsigned) {
  Context* context;
  if (const int result = check("cuEventCreate", &context)) return result;
  *event = new CUevent_st{context, {}, {}};
  const Lock lock(machine.mutex);
  machine.events.insert(*event);
  ++machine.counts.events;
  return kSuccess;
}

EXPORT int cuEventRecord(CUevent_st* event, CUstream_st* handle) {
  Context* context;
  if (const int result = check("cuEventRecord", &context)) return result;
  const auto stream = stream_of(handle);
  if (!stream || stream->context != event->context) return kInvalidHandle;
  const std::lock_guard lock(event->mutex);
  event->stream = stream;
  event->n = stream->n_added();
  return kSuccess;
}

EXPORT int cuEventQuery(CUevent_st* event) {
  if (const int result = asked_for("cuEventQuery")) return result;
  if (event->context->is_lost) return kLaunchFailed;
  if (machine.is_lying) return kSuccess;
  const std::lock_guard lock(event->mutex);
  const auto stream = event->stream.lock();
  const bool is_done = !stream || stream->n_done() >= event->n;
  if (event->context->is_lost) return kLaunchFailed;  // by what has just been done
  return is_done ? kSuccess : kNotReady;
}

EXPORT int cuEventDestroy_v2(CUevent_st* event) {
  {
    const Lock lock(machine.mutex);
    if (machine.events.erase(event) == 0) return kInvalidHandle;
    --machine.counts.events;
  }
  delete event;
  return kSuccess;
}

EXPORT int cuGetErrorName(int error, const char** name) {
  static const std::map<int, const char*> names = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {2, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
      {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
      {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
      {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"},
      {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
      {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
      {999, "CUDA_ERROR_UNKNOWN"},
  };
  const auto found = names.find(error);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kInvalidValue : kSuccess;
}

EXPORT int cuGetErrorString(int, const char** text) {
  *text = "emulated";
  return kSuccess;
}
