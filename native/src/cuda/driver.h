// libcuda, the NVIDIA driver's library, found at run time: a machine without it runs everything but copies to
// and from device memory. The declarations are our own, so that nobody needs a CUDA toolkit to build; names,
// types and numbers are those of the driver API since CUDA 11, which later drivers keep.
//
// cuMemcpyBatchAsync has another signature in CUDA 13 than in 12. The driver is asked for that of CUDA 12.8,
// which those of CUDA 13 go on having; by its bare name one would get whichever the driver has first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace p2pkv::cuda {

using Result = int;  // CUresult
using DeviceHandle = int;
using ContextHandle = struct CUctx_st*;
using StreamHandle = struct CUstream_st*;
using EventHandle = struct CUevent_st*;
using ModuleHandle = struct CUmod_st*;
using FunctionHandle = struct CUfunc_st*;
using DevicePointer = uint64_t;

constexpr Result kSuccess = 0;
constexpr Result kOutOfMemory = 2;
constexpr Result kNotReady = 600;
constexpr Result kNotSupported = 801;
constexpr unsigned kHostRegisterPortable = 1;  // page-locked for every context
constexpr unsigned kHostRegisterReadOnly = 8;  // as the mapping is: without it the driver refuses one
constexpr unsigned kStreamNonBlocking = 1;     // does not wait for the legacy default stream
constexpr unsigned kEventDisableTiming = 2;
constexpr int kCaptureModeRelaxed = 2;

// CUpointer_attribute and CUmemorytype.
constexpr int kAttributeContext = 1;
constexpr int kAttributeMemoryType = 2;
constexpr int kAttributeDeviceOrdinal = 9;
constexpr int kAttributeRangeStart = 11;
constexpr int kAttributeRangeSize = 12;
constexpr unsigned kMemoryTypeDevice = 2;

constexpr int kAttributeUsesHostPointers = 91;  // CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM

struct MemoryLocation {  // CUmemLocation; all zero: no hint
  int kind;
  int id;
};
struct CopyAttributes {  // CUmemcpyAttributes
  int source_order;
  MemoryLocation source_hint;
  MemoryLocation target_hint;
  unsigned flags;
};
static_assert(sizeof(CopyAttributes) == 24);
constexpr int kSourceInStreamOrder = 1;     // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
constexpr unsigned kPreferCopyEngines = 1;  // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
constexpr int kBatchesSince = 12080;        // the version of CUDA whose signature copy_batch has

struct Uuid {  // CUuuid
  char bytes[16];
};

struct Driver {
  Result (*init)(unsigned flags);
  Result (*driver_get_version)(int* version);
  Result (*device_get_count)(int* count);
  Result (*device_get)(DeviceHandle* device, int ordinal);
  Result (*device_get_name)(char* name, int length, DeviceHandle device);
  Result (*pointer_get_attributes)(unsigned n, int* attributes, void** data, DevicePointer pointer);
  Result (*primary_context_retain)(ContextHandle* context, DeviceHandle device);
  Result (*primary_context_release)(DeviceHandle device);
  Result (*context_push)(ContextHandle context);
  Result (*context_pop)(ContextHandle* context);
  Result (*exchange_capture_mode)(int* mode);
  Result (*host_register)(void* host, size_t nbytes, unsigned flags);
  Result (*host_unregister)(void* host);
  Result (*host_get_device_pointer)(DevicePointer* pointer, void* host, unsigned flags);
  Result (*stream_create)(StreamHandle* stream, unsigned flags);
  Result (*stream_destroy)(StreamHandle stream);
  Result (*stream_get_context)(StreamHandle stream, ContextHandle* context);
  Result (*copy_to_device)(DevicePointer to, const void* from, size_t nbytes, StreamHandle stream);
  Result (*copy_to_host)(void* to, DevicePointer from, size_t nbytes, StreamHandle stream);
  Result (*copy_on_devices)(DevicePointer to, DevicePointer from, size_t nbytes, StreamHandle stream);
  // Null in drivers before CUDA 12.8.
  Result (*copy_batch)(DevicePointer* to, DevicePointer* from, size_t* nbytes, size_t n,
                       CopyAttributes* attributes, size_t* first_of_attributes, size_t n_attributes,
                       size_t* failed, StreamHandle stream);
  Result (*event_create)(EventHandle* event, unsigned flags);
  Result (*event_record)(EventHandle event, StreamHandle stream);
  Result (*event_query)(EventHandle event);
  Result (*event_destroy)(EventHandle event);
  // These are for kernels of one's own, and null where the library lacks them.
  Result (*device_get_attribute)(int* value, int attribute, DeviceHandle device);
  Result (*module_load_data)(ModuleHandle* module, const void* image);
  Result (*module_unload)(ModuleHandle module);
  Result (*module_get_function)(FunctionHandle* function, ModuleHandle module, const char* name);
  Result (*launch_kernel)(FunctionHandle function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z,
                          unsigned threads_x, unsigned threads_y, unsigned threads_z, unsigned shared_nbytes,
                          StreamHandle stream, void** parameters, void** extra);
  // Null where the library lacks them; the second is cuDeviceGetUuid_v2.
  Result (*device_get_uuid)(Uuid* uuid, DeviceHandle device);
  Result (*device_get_part_uuid)(Uuid* uuid, DeviceHandle device);
  Result (*get_error_name)(Result error, const char** name);
  Result (*get_error_string)(Result error, const char** text);

  // Loads the library, P2PKV_CUDA_LIBRARY if that is set, and initializes it; for good, once both have
  // succeeded. Null, with what is missing in `error`.
  static const Driver* get(std::string* error);
  // The same if the process has loaded the library already, else null: so nothing is set up in a process that
  // does not use CUDA. Not initialized.
  static const Driver* get_if_loaded();
  // A call that not every driver has; null: this one doesn't. Only once `get` has succeeded.
  static void* find_call(const char* name);

  bool has_kernels() const {
    return device_get_attribute != nullptr && module_load_data != nullptr && module_unload != nullptr &&
           module_get_function != nullptr && launch_kernel != nullptr;
  }
  // "cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
  std::string describe(const char* call, Result error) const;
};

// While it lives the context is the thread's current one, and what is called does not end a capture of a CUDA
// graph in another thread: as is, a capture in the mode "global" forbids every thread even to query an event.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, ContextHandle context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  // kSuccess, or why the context is not current.
  Result result() const { return result_; }

 private:
  const Driver& driver_;
  int capture_mode_ = kCaptureModeRelaxed;
  Result result_;
};

}  // namespace p2pkv::cuda
