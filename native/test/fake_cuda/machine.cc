#include "machine.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace fake {
namespace {

// Runs on a stream's thread. The device address is looked up only now: its memory may have been freed.
void copy_now(Context* context, int n_losses, uint64_t device, uint8_t* host, size_t nbytes,
              bool is_to_device) {
  wait_to_copy();
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
    if (machine.is_corrupting && !is_to_device) host[at] ^= 1;
    machine.counts.copied_bytes += static_cast<int64_t>(n);
  }
  const Lock lock(machine.mutex);
  --machine.counts.queued;
}

// In pieces as well. Memory of another process that was freed meanwhile costs the context, as it may on a
// real device.
void copy_within_now(Context* context, int n_losses, uint64_t to, uint64_t from, size_t nbytes) {
  wait_to_copy();
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

// FAKE_CUDA_FAIL="CALL=RESULT,...": these calls fail as long as nobody resets the machine, from its first
// call on. For processes that a test can't talk to.
std::map<std::string, Failure> failures_of_environment() {
  std::map<std::string, Failure> failures;
  const char* const asked = std::getenv("FAKE_CUDA_FAIL");
  std::istringstream all(asked != nullptr ? asked : "");
  for (std::string one; std::getline(all, one, ',');) {
    const size_t split = one.find('=');
    failures[one.substr(0, split)] = {1, std::stoi(one.substr(split + 1)), true};
  }
  return failures;
}

Machine* make_machine() {
  auto* made = new Machine;
  made->failures = failures_of_environment();
  made->is_corrupting = std::getenv("FAKE_CUDA_CORRUPT") != nullptr;  // copies to the host bring wrong bytes
  return made;
}

// From where to where a copy goes. False for memory that is not there, or not page-locked. With the lock.
bool classify(const Context& context, Copy* copy) {
  uint64_t offset;
  const Allocation* target = find(copy->to, copy->nbytes, &offset);
  const Allocation* source = find(copy->from, copy->nbytes, &offset);
  if (target != nullptr && source != nullptr) {
    copy->way = Way::kWithin;
    return true;
  }
  const Allocation* there = target != nullptr ? target : source;
  if (there == nullptr || there->device != context.device) return false;
  copy->way = target != nullptr ? Way::kToDevice : Way::kToHost;
  const uint64_t host = target != nullptr ? copy->from : copy->to;
  return is_locked(reinterpret_cast<const void*>(host), copy->nbytes);
}

}  // namespace

Machine& machine = *make_machine();

size_t to_pages(size_t nbytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (nbytes + page - 1) / page * page;
}

uint64_t allocate(int device, size_t nbytes, bool is_virtual) {
  const size_t mapped = to_pages(nbytes);
  const size_t behind_it = is_virtual ? 0 : to_pages(sizeof(Fate));
  const int fd = make_memfd(device);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(mapped + behind_it)) != 0) return 0;
  void* shown = mmap(nullptr, mapped, PROT_NONE, MAP_SHARED, fd, 0);
  void* behind = mmap(nullptr, mapped + behind_it, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (shown == MAP_FAILED || behind == MAP_FAILED) return 0;
  auto* bytes = static_cast<uint8_t*>(behind);
  auto* fate = is_virtual ? nullptr : reinterpret_cast<Fate*>(bytes + mapped);
  const Lock lock(machine.mutex);
  machine.allocations[reinterpret_cast<uint64_t>(shown)] = {device,     nbytes,           bytes, fd,
                                                            is_virtual, kMayReadAndWrite, fate};
  return reinterpret_cast<uint64_t>(shown);
}

int free_now(uint64_t address) {
  const Lock lock(machine.mutex);
  const auto found = machine.allocations.find(address);
  if (found == machine.allocations.end()) return kInvalidValue;
  const Allocation& allocation = found->second;
  const size_t mapped = to_pages(allocation.nbytes);
  if (allocation.fate != nullptr) {
    allocation.fate->is_freed = 1;
    if (allocation.fate->n_mappings > 0) ++machine.counts.freed_while_mapped;
  }
  munmap(reinterpret_cast<void*>(address), mapped);
  munmap(allocation.behind, mapped + (allocation.fate != nullptr ? to_pages(sizeof(Fate)) : 0));
  close(allocation.fd);
  machine.allocations.erase(found);
  return kSuccess;
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

void wait_to_copy() {
  std::unique_lock lock(machine.holding);
  machine.let_go.wait(lock, [] { return !machine.are_copies_held || machine.n_let_through > 0; });
  if (machine.are_copies_held) --machine.n_let_through;
}

// The copies of a launch are done one after another, in whichever order: the last first, so that nobody
// relies on another one.
int launch(const char* call, std::vector<Copy> copies, CUstream_st* handle, size_t* failed) {
  Context* context;
  if (const int result = check(call, &context)) return result;
  const std::shared_ptr<CUstream_st> stream = stream_of(handle);
  if (!stream || stream->context != context) return kInvalidHandle;
  const Lock lock(machine.mutex);
  ++machine.counts.launches;
  size_t n_good = 0;
  while (n_good < copies.size() && classify(*context, &copies[n_good])) ++n_good;
  *failed = n_good;
  const bool are_all_good = n_good == copies.size();
  copies.resize(n_good);  // those before it go on, as they may
  for (const Copy& copy : copies) {
    ++(copy.way == Way::kToDevice ? machine.counts.copies_to_device
       : copy.way == Way::kToHost ? machine.counts.copies_to_host
                                  : machine.counts.copies_within);
    ++machine.counts.queued;
    // Until the copy has ended there may be anything: who looks before finds neither the old nor the new
    // bytes.
    if (copy.way == Way::kToHost) std::memset(reinterpret_cast<void*>(copy.to), 0xDB, copy.nbytes);
  }
  for (size_t i = n_good; i-- > 0;) {
    stream->add([context, copy = copies[i], n_losses = context->n_losses.load()] {
      if (copy.way == Way::kWithin)
        return copy_within_now(context, n_losses, copy.to, copy.from, copy.nbytes);
      const bool is_to_device = copy.way == Way::kToDevice;
      copy_now(context, n_losses, is_to_device ? copy.to : copy.from,
               reinterpret_cast<uint8_t*>(is_to_device ? copy.from : copy.to), copy.nbytes, is_to_device);
    });
  }
  return are_all_good ? kSuccess : kInvalidValue;
}

}  // namespace fake
