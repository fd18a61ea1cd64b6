#include "machine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace fake {
namespace {

// Runs on a stream's thread. The device address is looked up only now: its memory may have been freed.
void copy_now(Context* context, int n_losses, uint64_t device, uint8_t* host, size_t nbytes,
              bool is_to_device) {
  wait_until_let_go(&machine.are_copies_held);
  pause(machine.copy_delay_us);
  // in pieces, so that who looks too early sees some of it
  constexpr size_t kPiece = 4096;
  const auto is_lost = [&] { return context->is_lost || context->n_losses != n_losses; };
  for (size_t at = 0; at < nbytes && !is_lost(); at += kPiece) {
    const Lock lock(machine.mutex);
    const size_t n = std::min(kPiece, nbytes - at);
    uint64_t offset;
    const Allocation* allocation = find(device + at, n, &offset);
    if (allocation == nullptr) {
      context->is_lost = true;
      break;
    }
    uint8_t* behind = allocation->behind + offset;
    std::memcpy(is_to_device ? behind : host + at, is_to_device ? host + at : behind, n);
    machine.counts.copied_bytes += static_cast<int64_t>(n);
  }
  const Lock lock(machine.mutex);
  --machine.counts.queued;
}

// In pieces as well. Memory of another process that was freed meanwhile costs the context, as it may on a
// real device.
void copy_within_now(Context* context, int n_losses, uint64_t to, uint64_t from, size_t nbytes) {
  wait_until_let_go(&machine.are_copies_held);
  pause(machine.copy_delay_us);
  constexpr size_t kPiece = 64 << 10;
  const auto is_lost = [&] { return context->is_lost || context->n_losses != n_losses; };
  for (size_t at = 0; at < nbytes && !is_lost(); at += kPiece) {
    const Lock lock(machine.mutex);
    const size_t n = std::min(kPiece, nbytes - at);
    uint64_t to_offset, from_offset;
    const Allocation* target = find(to + at, n, &to_offset);
    const Allocation* source = find(from + at, n, &from_offset);
    const bool is_there = target != nullptr && source != nullptr && target->access == kMayReadAndWrite &&
                          source->access != kMayNothing && !(source->fate && source->fate->is_freed);
    if (!is_there) {
      context->is_lost = true;
      break;
    }
    std::memcpy(target->behind + to_offset, source->behind + from_offset, n);
    machine.counts.copied_bytes += static_cast<int64_t>(n);
  }
  const Lock lock(machine.mutex);
  --machine.counts.queued;
}

}  // namespace

size_t to_pages(size_t nbytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (nbytes + page - 1) / page * page;
}

const Allocation* find(uint64_t address, size_t nbytes, uint64_t* offset) {
  auto after = machine.allocations.upper_bound(address);
  if (after == machine.allocations.begin()) return nullptr;
  const auto& [start, allocation] = *std::prev(after);
  *offset = address - start;
  if (*offset >= allocation.nbytes || nbytes > allocation.nbytes - *offset) return nullptr;
  return &allocation;
}

bool is_locked(const void* host, size_t nbytes) {
  const auto address = reinterpret_cast<uint64_t>(host);
  auto after = machine.locked.upper_bound(address);
  if (after == machine.locked.begin()) return false;
  const auto& [start, size] = *std::prev(after);
  return address - start <= size && nbytes <= size - (address - start);
}

int asked_for(const char* call) {
  const Lock lock(machine.mutex);
  const auto found = machine.failures.find(call);
  if (found == machine.failures.end()) return kSuccess;
  Failure& failure = found->second;
  if (failure.n > 1) {
    --failure.n;
    return kSuccess;
  }
  const int result = failure.result;
  if (!failure.stays) machine.failures.erase(found);
  return result;
}

int check(const char* call, Context** context) {
  if (!machine.is_initialized) return kNotInitialized;
  if (const int result = asked_for(call)) return result;
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  return (*context)->is_lost ? kLaunchFailed : kSuccess;
}

std::shared_ptr<CUstream_st> stream_of(CUstream_st* handle) {
  const Lock lock(machine.mutex);
  const auto number = reinterpret_cast<uintptr_t>(handle);
  if (number > 2) {
    const auto found = machine.streams.find(handle);
    return found == machine.streams.end() ? nullptr : found->second;
  }
  if (current.empty()) return nullptr;
  auto& made = machine.default_streams[{current.back(), number == 2 ? 2 : 1}];
  if (!made) made = std::make_shared<CUstream_st>(current.back());
  return made;
}

void pause(int us) {
  if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

void wait_until_let_go(const bool* is_held) {
  std::unique_lock lock(machine.holding);
  machine.let_go.wait(lock, [is_held] { return !*is_held; });
}

int queue_copy(const char* call, uint64_t device, void* host, size_t nbytes, CUstream_st* handle,
               bool is_to_device) {
  Context* context;
  if (const int result = check(call, &context)) return result;
  const std::shared_ptr<CUstream_st> stream = stream_of(handle);
  if (!stream || stream->context != context) return kInvalidHandle;
  {
    const Lock lock(machine.mutex);
    uint64_t offset;
    const Allocation* allocation = find(device, nbytes, &offset);
    if (allocation == nullptr || allocation->device != context->device) return kInvalidValue;
    if (!is_locked(host, nbytes)) return kInvalidValue;
    ++(is_to_device ? machine.counts.copies_to_device : machine.counts.copies_to_host);
    ++machine.counts.queued;
  }
  stream->add([=, n_losses = context->n_losses.load()] {
    copy_now(context, n_losses, device, static_cast<uint8_t*>(host), nbytes, is_to_device);
  });
  return kSuccess;
}

int queue_inner_copy(uint64_t to, uint64_t from, size_t nbytes, CUstream_st* handle) {
  Context* context;
  if (const int result = check("cuMemcpyDtoDAsync", &context)) return result;
  const std::shared_ptr<CUstream_st> stream = stream_of(handle);
  if (!stream || stream->context != context) return kInvalidHandle;
  {
    const Lock lock(machine.mutex);
    uint64_t offset;
    if (find(to, nbytes, &offset) == nullptr || find(from, nbytes, &offset) == nullptr) return kInvalidValue;
    ++machine.counts.copies_within;
    ++machine.counts.queued;
  }
  stream->add(
      [=, n_losses = context->n_losses.load()] { copy_within_now(context, n_losses, to, from, nbytes); });
  return kSuccess;
}

}  // namespace fake
