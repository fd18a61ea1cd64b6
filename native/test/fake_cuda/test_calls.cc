// What tests tell the emulated machine: fake_cuda.h.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>

#include "machine.h"

using namespace fake;

extern "C" int cuInit(unsigned flags);
extern "C" int cuStreamDestroy_v2(CUstream_st* stream);

namespace {

// Who allocates has a context.
uint64_t allocate_in_context(int device, size_t nbytes, bool is_virtual) {
  cuInit(0);
  const uint64_t address = allocate(device, nbytes, is_virtual);
  const Lock lock(machine.mutex);
  if (address != 0) ++machine.contexts[device].n_retained;
  return address;
}

}  // namespace

EXPORT uint64_t fake_cuda_allocate(int device, size_t nbytes) {
  return allocate_in_context(device, nbytes, false);
}

EXPORT uint64_t fake_cuda_allocate_virtual(int device, size_t nbytes) {
  return allocate_in_context(device, nbytes, true);
}

EXPORT int fake_cuda_free(uint64_t address) {
  const Lock lock(machine.mutex);
  const auto found = machine.allocations.find(address);
  if (found == machine.allocations.end()) return kInvalidValue;
  --machine.contexts[found->second.device].n_retained;
  return free_now(address);
}

EXPORT int fake_cuda_adopt(int device, uint64_t address, size_t nbytes, int fd) {
  cuInit(0);
  const Lock lock(machine.mutex);
  const int own = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 3);
  machine.allocations[address] = {device, nbytes, reinterpret_cast<uint8_t*>(address), own, true};
  return kSuccess;
}

EXPORT int fake_cuda_disown(uint64_t address) {
  const Lock lock(machine.mutex);
  const auto found = machine.allocations.find(address);
  if (found == machine.allocations.end()) return kInvalidValue;
  if (found->second.fd >= 0) close(found->second.fd);
  machine.allocations.erase(found);
  return kSuccess;
}

EXPORT int fake_cuda_write(uint64_t to, const void* from, size_t nbytes) {
  const Lock lock(machine.mutex);
  uint64_t offset;
  const Allocation* allocation = find(to, nbytes, &offset);
  if (allocation == nullptr) return kInvalidValue;
  std::memcpy(allocation->behind + offset, from, nbytes);
  return kSuccess;
}

EXPORT int fake_cuda_read(void* to, uint64_t from, size_t nbytes) {
  const Lock lock(machine.mutex);
  uint64_t offset;
  const Allocation* allocation = find(from, nbytes, &offset);
  if (allocation == nullptr) return kInvalidValue;
  std::memcpy(to, allocation->behind + offset, nbytes);
  return kSuccess;
}

EXPORT uint64_t fake_cuda_stream(int device) {
  auto made = std::make_shared<CUstream_st>(&machine.contexts[device]);
  const Lock lock(machine.mutex);
  const auto handle = reinterpret_cast<uint64_t>(made.get());
  machine.streams[made.get()] = std::move(made);
  ++machine.counts.streams;
  return handle;
}

EXPORT int fake_cuda_destroy_stream(uint64_t handle) {
  return cuStreamDestroy_v2(reinterpret_cast<CUstream_st*>(handle));
}

EXPORT int fake_cuda_launch_fill(uint64_t handle, uint64_t to, uint8_t value, size_t nbytes, int delay_us) {
  current.push_back(&machine.contexts[0]);  // for the default streams
  const auto stream = stream_of(reinterpret_cast<CUstream_st*>(handle));
  current.pop_back();
  if (!stream) return kInvalidHandle;
  {
    const Lock lock(machine.mutex);
    ++machine.counts.queued;
  }
  stream->add([=] {
    wait_until_let_go(&machine.are_kernels_held);
    pause(delay_us);
    const std::vector<uint8_t> bytes(nbytes, value);
    fake_cuda_write(to, bytes.data(), nbytes);
    const Lock lock(machine.mutex);
    --machine.counts.queued;
  });
  return kSuccess;
}

EXPORT void fake_cuda_fail(const char* call, int n, int result, int stays) {
  const Lock lock(machine.mutex);
  if (n == 0) {
    machine.failures.clear();
  } else {
    machine.failures[call] = {n, result, stays != 0};
  }
}

EXPORT void fake_cuda_lose(int device) {
  ++machine.contexts[device].n_losses;
  machine.contexts[device].is_lost = true;
}

EXPORT void fake_cuda_delay_copies(int us) {
  machine.copy_delay_us = us;
}

EXPORT void fake_cuda_hold(int copies, int kernels) {
  {
    const std::lock_guard lock(machine.holding);
    machine.are_copies_held = copies != 0;
    machine.are_kernels_held = kernels != 0;
    machine.n_let_through = 0;
  }
  machine.let_go.notify_all();
}

EXPORT void fake_cuda_let_through(int copies) {
  {
    const std::lock_guard lock(machine.holding);
    machine.n_let_through = copies;
  }
  machine.let_go.notify_all();
}

EXPORT void fake_cuda_lie_about_events(int lying) {
  machine.is_lying = lying != 0;
}

EXPORT void fake_cuda_counts(FakeCudaCounts* out) {
  const Lock lock(machine.mutex);
  *out = machine.counts;
  out->contexts = machine.contexts[0].n_retained + machine.contexts[1].n_retained;
}

EXPORT void fake_cuda_reset() {
  fake_cuda_hold(0, 0);
  fake_cuda_delay_copies(0);
  fake_cuda_lie_about_events(0);
  fake_cuda_fail("", 0, 0, 0);
  for (Context& context : machine.contexts) context.is_lost = false;
}
