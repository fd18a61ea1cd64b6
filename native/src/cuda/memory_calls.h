// The driver's calls for memory that is made here or mapped from another process. Not every driver has all of
// them, so they are looked for one by one.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/driver.h"

namespace p2pkv::cuda {

constexpr int kHandleIsDescriptor = 1;  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr int kLocationIsDevice = 1;    // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kMayRead = 1;             // CU_MEM_ACCESS_FLAGS_PROT_READ
constexpr int kMayReadAndWrite = 3;     // CU_MEM_ACCESS_FLAGS_PROT_READWRITE

using MemoryHandle = uint64_t;  // CUmemGenericAllocationHandle
struct IpcHandle {              // CUipcMemHandle
  char bytes[64];
};
struct AccessDescription {  // CUmemAccessDesc
  int location_kind;
  int location;
  int flags;
};
struct AllocationProperties {  // CUmemAllocationProp
  int kind;
  int handle_kinds;
  int location_kind;
  int location;
  void* unused;
  uint8_t flags[8];
};
static_assert(sizeof(AllocationProperties) == 32);

struct MemoryCalls {
  Result (*ipc_get)(IpcHandle* handle, DevicePointer pointer);
  Result (*ipc_open)(DevicePointer* pointer, IpcHandle handle, unsigned flags);
  Result (*ipc_close)(DevicePointer pointer);
  Result (*retain)(MemoryHandle* handle, void* address);
  Result (*release)(MemoryHandle handle);
  Result (*export_handle)(void* shareable, MemoryHandle handle, int type, uint64_t flags);
  Result (*import_handle)(MemoryHandle* handle, void* shareable, int type);
  Result (*reserve)(DevicePointer* pointer, size_t nbytes, size_t alignment, DevicePointer at,
                    uint64_t flags);
  Result (*unreserve)(DevicePointer pointer, size_t nbytes);
  Result (*map)(DevicePointer pointer, size_t nbytes, size_t offset, MemoryHandle handle, uint64_t flags);
  Result (*unmap)(DevicePointer pointer, size_t nbytes);
  Result (*set_access)(DevicePointer pointer, size_t nbytes, const AccessDescription* description, size_t n);
  Result (*allocate)(DevicePointer* pointer, size_t nbytes);
  Result (*free)(DevicePointer pointer);
  Result (*granularity)(size_t* nbytes, const AllocationProperties* properties, int option);
  Result (*create)(MemoryHandle* handle, size_t nbytes, const AllocationProperties* properties,
                   uint64_t flags);
  // Null before CUDA 11.7.
  Result (*range_handle)(void* handle, DevicePointer pointer, size_t nbytes, int type, uint64_t flags);

  std::string missing;  // a sentence; empty: all but the last are there

  // Once the driver is there.
  static const MemoryCalls& get();
};

// A driver call that failed becomes a sentence. Once the driver is there.
bool succeeded(const char* call, Result result, std::string* error);

}  // namespace p2pkv::cuda
