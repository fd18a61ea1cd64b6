// CUDA's calls for memory that other processes map, of the emulated machine.
//
// Strict where the real driver says that behaviour is undefined, or differs between its versions: memory that
// was freed while another process mapped it by its handle costs that process its context, and a process can't
// open what is its own.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "machine.h"

using namespace fake;

namespace {

constexpr int kOutOfMemory = 2;
constexpr uint64_t kOverPcie = 1;
constexpr size_t kGranule = 2 << 20;  // as of today's devices

struct IpcHandle {
  char bytes[64];
};

// What is in such a handle here.
struct Name {
  int pid;
  int fd;
  uint64_t inode;
  size_t nbytes;
  uint64_t memory;
};

struct AllocationProperties {
  int kind;
  int handle_kinds;
  int location_kind;
  int location;
  void* unused;
  unsigned char flags[8];
};

struct AccessDescription {
  int location_kind;
  int location;
  int flags;
};

uint64_t inode_of(int fd, size_t* nbytes) {
  struct stat info{};
  if (fstat(fd, &info) != 0) return 0;
  *nbytes = static_cast<size_t>(info.st_size);
  return info.st_ino;
}

int open_as_new(const Name& name, int device, uint64_t* address) {
  const std::string path = "/proc/" + std::to_string(name.pid) + "/fd/" + std::to_string(name.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  size_t size = 0;
  if (fd < 0 || inode_of(fd, &size) != name.inode) {  // its process, or the memory, is no more
    if (fd >= 0) close(fd);
    return kInvalidValue;
  }
  const size_t mapped = to_pages(name.nbytes);
  void* shown = mmap(nullptr, mapped, PROT_NONE, MAP_SHARED, fd, 0);
  auto* behind = static_cast<uint8_t*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  if (shown == MAP_FAILED || behind == MAP_FAILED) return kOutOfMemory;
  auto* fate = reinterpret_cast<Fate*>(behind + mapped);
  ++fate->n_mappings;
  *address = reinterpret_cast<uint64_t>(shown);
  machine.allocations[*address] = {device, name.nbytes, behind, fd, false, kMayReadAndWrite, fate};
  machine.opened[{name.pid, name.inode}] = {*address, 1};
  ++machine.counts.mappings;
  return kSuccess;
}

}  // namespace

EXPORT int cuIpcGetMemHandle(IpcHandle* handle, uint64_t pointer) {
  Context* context;
  if (const int result = check("cuIpcGetMemHandle", &context)) return result;
  const Lock lock(machine.mutex);
  const auto found = machine.allocations.find(pointer);
  if (found == machine.allocations.end() || found->second.is_virtual) return kInvalidValue;
  size_t size = 0;
  const Name name{getpid(), found->second.fd, inode_of(found->second.fd, &size), found->second.nbytes,
                  machine.devices[static_cast<size_t>(context->device)].memory};
  std::memset(handle->bytes, 0, sizeof handle->bytes);
  std::memcpy(handle->bytes, &name, sizeof name);
  return kSuccess;
}

EXPORT int cuIpcOpenMemHandle_v2(uint64_t* pointer, IpcHandle handle, unsigned flags) {
  Context* context;
  if (const int result = check("cuIpcOpenMemHandle", &context)) return result;
  Name name;
  std::memcpy(&name, handle.bytes, sizeof name);
  if (flags != 1) return kInvalidValue;
  if (name.pid == getpid()) return kInvalidContext;
  if (is_of_other_instance(name.memory, context->device)) return kNotSupported;
  const Lock lock(machine.mutex);
  const auto known = machine.opened.find({name.pid, name.inode});
  if (known == machine.opened.end()) return open_as_new(name, context->device, pointer);
  ++known->second.n_times;
  *pointer = known->second.address;
  return kSuccess;
}

EXPORT int cuIpcCloseMemHandle(uint64_t pointer) {
  Context* context;
  if (const int result = check("cuIpcCloseMemHandle", &context)) return result;
  const Lock lock(machine.mutex);
  for (auto known = machine.opened.begin(); known != machine.opened.end(); ++known) {
    if (known->second.address != pointer) continue;
    if (--known->second.n_times > 0) return kSuccess;
    const Allocation& allocation = machine.allocations.at(pointer);
    --allocation.fate->n_mappings;
    munmap(reinterpret_cast<void*>(pointer), to_pages(allocation.nbytes));
    munmap(allocation.behind, to_pages(allocation.nbytes) + to_pages(sizeof(Fate)));
    close(allocation.fd);
    machine.allocations.erase(pointer);
    machine.opened.erase(known);
    --machine.counts.mappings;
    return kSuccess;
  }
  return kInvalidValue;
}

EXPORT int cuMemAlloc_v2(uint64_t* pointer, size_t nbytes) {
  Context* context;
  if (const int result = check("cuMemAlloc", &context)) return result;
  *pointer = allocate(context->device, nbytes, false);
  return *pointer == 0 ? kOutOfMemory : kSuccess;
}

EXPORT int cuMemFree_v2(uint64_t pointer) {
  return free_now(pointer);
}

EXPORT int cuMemGetAllocationGranularity(size_t* nbytes, const AllocationProperties*, int) {
  *nbytes = kGranule;
  return kSuccess;
}

EXPORT int cuMemCreate(uint64_t* handle, size_t nbytes, const AllocationProperties* properties, uint64_t) {
  Context* context;
  if (const int result = check("cuMemCreate", &context)) return result;
  if (nbytes % kGranule != 0 || properties->kind != 1 || properties->handle_kinds != 1 ||
      properties->location_kind != 1 || properties->location < 0 || properties->location >= kDevices)
    return kInvalidValue;
  const int fd = make_memfd(context->device);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(nbytes)) != 0) return kOutOfMemory;
  const Lock lock(machine.mutex);
  *handle = ++machine.last_physical;
  machine.physical[*handle] = {fd, nbytes};
  return kSuccess;
}

// Whole pages of the host's alone, as the real one has it.
EXPORT int cuMemGetHandleForAddressRange(int* descriptor, uint64_t pointer, size_t nbytes, int type,
                                         uint64_t flags) {
  Context* context;
  if (const int result = check("cuMemGetHandleForAddressRange", &context)) return result;
  const int by_pcie = flags == kOverPcie ? asked_for("cuMemGetHandleForAddressRange over PCIe") : kSuccess;
  if (by_pcie != kSuccess) return by_pcie;
  const Lock lock(machine.mutex);
  uint64_t offset;
  const Allocation* allocation = find(pointer, 1, &offset);
  if (allocation == nullptr || allocation->fd < 0 || type != 1 || flags > kOverPcie ||
      offset % to_pages(1) != 0 || nbytes != to_pages(nbytes) ||
      offset + nbytes > to_pages(allocation->nbytes))
    return kInvalidValue;
  if (offset != 0)
    return kNotSupported;  // p2pkv exports whole allocations, and nothing else is looked at here
  ++(flags == kOverPcie ? machine.counts.exports_over_pcie : machine.counts.exports);
  *descriptor = fcntl(allocation->fd, F_DUPFD_CLOEXEC, 3);
  return kSuccess;
}

EXPORT int cuMemRetainAllocationHandle(uint64_t* handle, void* address) {
  Context* context;
  if (const int result = check("cuMemRetainAllocationHandle", &context)) return result;
  const Lock lock(machine.mutex);
  uint64_t offset;
  const Allocation* allocation = find(reinterpret_cast<uint64_t>(address), 1, &offset);
  if (allocation == nullptr || !allocation->is_virtual || allocation->fd < 0) return kInvalidValue;
  *handle = ++machine.last_physical;
  machine.physical[*handle] = {fcntl(allocation->fd, F_DUPFD_CLOEXEC, 3), to_pages(allocation->nbytes)};
  return kSuccess;
}

EXPORT int cuMemRelease(uint64_t handle) {
  const Lock lock(machine.mutex);
  const auto found = machine.physical.find(handle);
  if (found == machine.physical.end()) return kInvalidValue;
  close(found->second.fd);
  machine.physical.erase(found);
  return kSuccess;
}

EXPORT int cuMemExportToShareableHandle(int* descriptor, uint64_t handle, int type, uint64_t) {
  if (const int result = asked_for("cuMemExportToShareableHandle")) return result;
  const Lock lock(machine.mutex);
  const auto found = machine.physical.find(handle);
  if (found == machine.physical.end() || type != 1) return kInvalidValue;
  *descriptor = fcntl(found->second.fd, F_DUPFD_CLOEXEC, 3);
  return kSuccess;
}

EXPORT int cuMemImportFromShareableHandle(uint64_t* handle, void* descriptor, int type) {
  Context* context;
  if (const int result = check("cuMemImportFromShareableHandle", &context)) return result;
  const int fd = fcntl(static_cast<int>(reinterpret_cast<uintptr_t>(descriptor)), F_DUPFD_CLOEXEC, 3);
  size_t size = 0;
  if (fd < 0 || type != 1 || inode_of(fd, &size) == 0) return kInvalidValue;
  if (is_of_other_instance(memory_of(fd, context->device), context->device)) {
    close(fd);
    return kNotSupported;
  }
  const Lock lock(machine.mutex);
  *handle = ++machine.last_physical;
  machine.physical[*handle] = {fd, to_pages(size)};
  return kSuccess;
}

EXPORT int cuMemAddressReserve(uint64_t* pointer, size_t nbytes, size_t, uint64_t, uint64_t) {
  Context* context;
  if (const int result = check("cuMemAddressReserve", &context)) return result;
  void* shown =
      mmap(nullptr, to_pages(nbytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (shown == MAP_FAILED) return kOutOfMemory;
  *pointer = reinterpret_cast<uint64_t>(shown);
  const Lock lock(machine.mutex);
  machine.reserved[*pointer] = nbytes;
  return kSuccess;
}

EXPORT int cuMemAddressFree(uint64_t pointer, size_t nbytes) {
  const Lock lock(machine.mutex);
  const auto found = machine.reserved.find(pointer);
  if (found == machine.reserved.end() || found->second != nbytes || machine.allocations.contains(pointer))
    return kInvalidValue;
  munmap(reinterpret_cast<void*>(pointer), to_pages(nbytes));
  machine.reserved.erase(found);
  return kSuccess;
}

EXPORT int cuMemMap(uint64_t pointer, size_t nbytes, size_t offset, uint64_t handle, uint64_t) {
  Context* context;
  if (const int result = check("cuMemMap", &context)) return result;
  const Lock lock(machine.mutex);
  const auto place = machine.reserved.find(pointer);
  const auto physical = machine.physical.find(handle);
  if (place == machine.reserved.end() || physical == machine.physical.end() || offset != 0 ||
      nbytes > place->second || to_pages(nbytes) != physical->second.nbytes)
    return kInvalidValue;
  const int fd = fcntl(physical->second.fd, F_DUPFD_CLOEXEC, 3);
  void* behind = mmap(nullptr, to_pages(nbytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (behind == MAP_FAILED) behind = mmap(nullptr, to_pages(nbytes), PROT_READ, MAP_SHARED, fd, 0);
  if (behind == MAP_FAILED) return kOutOfMemory;
  machine.allocations[pointer] = {context->device, nbytes, static_cast<uint8_t*>(behind), fd, true,
                                  kMayNothing,     nullptr};
  ++machine.counts.mappings;
  return kSuccess;
}

EXPORT int cuMemUnmap(uint64_t pointer, size_t nbytes) {
  const Lock lock(machine.mutex);
  const auto found = machine.allocations.find(pointer);
  if (found == machine.allocations.end() || found->second.nbytes != nbytes) return kInvalidValue;
  munmap(found->second.behind, to_pages(nbytes));
  close(found->second.fd);
  machine.allocations.erase(found);
  --machine.counts.mappings;
  return kSuccess;
}

EXPORT int cuMemSetAccess(uint64_t pointer, size_t nbytes, const AccessDescription* access, size_t n) {
  if (const int result = asked_for("cuMemSetAccess")) return result;
  const Lock lock(machine.mutex);
  const auto found = machine.allocations.find(pointer);
  if (found == machine.allocations.end() || found->second.nbytes != nbytes || n != 1 ||
      access->location_kind != 1 || access->location < 0 || access->location >= kDevices)
    return kInvalidValue;
  if (access->flags != kMayRead && access->flags != kMayReadAndWrite) return kNotSupported;
  found->second.access = access->flags;
  return kSuccess;
}
