// An emulated NVIDIA driver for machines without one: the calls that p2pkv binds, with device memory that a
// processor can't touch, copies that happen later and on another thread, and errors on demand. Stricter than
// the real one where that finds mistakes: copies from or to memory that is not page-locked are refused.
//
// Its own code throughout: nothing but names, types and numbers is CUDA's.
#include "fake_cuda.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kNotInitialized = 3;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidContext = 201;
constexpr int kInvalidHandle = 400;
constexpr int kNotReady = 600;
constexpr int kAlreadyRegistered = 712;
constexpr int kNotRegistered = 713;
constexpr int kLaunchFailed = 719;
constexpr int kDevices = 2;

struct Context {
  int device;
  int n_retained = 0;
  std::atomic<bool> is_lost = false;
  std::atomic<int> n_losses = 0;
};
Context contexts[kDevices] = {{0}, {1}};

struct Allocation {
  int device;
  size_t nbytes;
  uint8_t* behind;  // the same memory, where copies and kernels reach it
};

// Never destroyed, as what comes with them: streams' threads may still run when the process ends.
std::recursive_mutex& mutex = *new std::recursive_mutex;  // guards all below
auto& allocations = *new std::map<uint64_t, Allocation>;
auto& locked = *new std::map<uint64_t, size_t>;  // page-locked host memory
auto& events = *new std::set<const void*>;
struct Failure {
  int n;
  int result;
  bool stays;
};
auto& failures = *new std::map<std::string, Failure>;
FakeCudaCounts counts{};

std::atomic<bool> is_initialized = false;
std::atomic<int> copy_delay_us = 0;
std::atomic<bool> is_lying = false;
std::mutex& holding = *new std::mutex;  // guards both of these
std::condition_variable& let_go = *new std::condition_variable;
bool are_copies_held = false;
bool are_kernels_held = false;

thread_local std::vector<Context*> current;
thread_local int capture_mode = 0;

using Lock = std::lock_guard<std::recursive_mutex>;

// The allocation that holds all of these bytes.
const Allocation* find(uint64_t address, size_t nbytes, uint64_t* offset) {
  auto after = allocations.upper_bound(address);
  if (after == allocations.begin()) return nullptr;
  const auto& [start, allocation] = *std::prev(after);
  *offset = address - start;
  if (*offset >= allocation.nbytes || nbytes > allocation.nbytes - *offset) return nullptr;
  return &allocation;
}

bool is_locked(const void* host, size_t nbytes) {
  const auto address = reinterpret_cast<uint64_t>(host);
  auto after = locked.upper_bound(address);
  if (after == locked.begin()) return false;
  const auto& [start, size] = *std::prev(after);
  return address - start <= size && nbytes <= size - (address - start);
}

// What a test has asked this call to give, or kSuccess.
int asked_for(const char* call) {
  const Lock lock(mutex);
  const auto found = failures.find(call);
  if (found == failures.end()) return kSuccess;
  Failure& failure = found->second;
  if (failure.n > 1) {
    --failure.n;
    return kSuccess;
  }
  const int result = failure.result;
  if (!failure.stays) failures.erase(found);
  return result;
}

// Of every call that needs a context: the current one, in working order.
int check(const char* call, Context** context) {
  if (!is_initialized) return kNotInitialized;
  if (const int result = asked_for(call)) return result;
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  return (*context)->is_lost ? kLaunchFailed : kSuccess;
}

}  // namespace

struct CUstream_st {
  explicit CUstream_st(Context* context) : context(context), thread([this] { run(); }) {}
  ~CUstream_st() {
    {
      const std::lock_guard lock(mutex_);
      is_ending_ = true;
    }
    changed_.notify_all();
    thread.join();
  }

  void add(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      ++n_added_;
      work_.push_back(std::move(work));
    }
    changed_.notify_all();
  }

  uint64_t n_added() {
    const std::lock_guard lock(mutex_);
    return n_added_;
  }
  uint64_t n_done() {
    const std::lock_guard lock(mutex_);
    return n_done_;
  }

  Context* const context;

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return is_ending_ || !work_.empty(); });
      if (work_.empty()) return;  // what was queued before the stream was destroyed is still done, as in CUDA
      auto work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      work();
      lock.lock();
      ++n_done_;
    }
  }

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  uint64_t n_added_ = 0;
  uint64_t n_done_ = 0;
  bool is_ending_ = false;
  std::thread thread;  // last: it uses all of the above
};

struct CUevent_st {
  Context* context;
  std::mutex mutex;
  std::weak_ptr<CUstream_st> stream;
  uint64_t n = 0;  // done when the stream has done so much
};

namespace {

auto& handles = *new std::map<const void*, std::shared_ptr<CUstream_st>>;  // of streams
// The special ones, made when needed.
auto& defaults = *new std::map<std::pair<Context*, int>, std::shared_ptr<CUstream_st>>;

// 1 is the legacy default stream, 2 the thread's. One a context is enough for both.
std::shared_ptr<CUstream_st> stream_of(CUstream_st* handle) {
  const Lock lock(mutex);
  const auto number = reinterpret_cast<uintptr_t>(handle);
  if (number > 2) {
    const auto found = handles.find(handle);
    return found == handles.end() ? nullptr : found->second;
  }
  if (current.empty()) return nullptr;
  auto& made = defaults[{current.back(), number == 2 ? 2 : 1}];
  if (!made) made = std::make_shared<CUstream_st>(current.back());
  return made;
}

void pause(int us) {
  if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

void wait_until_let_go(const bool* is_held) {
  std::unique_lock lock(holding);
  let_go.wait(lock, [is_held] { return !*is_held; });
}

// Runs on a stream's thread. The device address is looked up only now: its memory may have been freed.
void copy_now(Context* context, int n_losses, uint64_t device, uint8_t* host, size_t nbytes,
              bool is_to_device) {
  wait_until_let_go(&are_copies_held);
  pause(copy_delay_us);
  // in pieces, so that who looks too early sees some of it
  constexpr size_t kPiece = 4096;
  const auto is_lost = [&] { return context->is_lost || context->n_losses != n_losses; };
  for (size_t at = 0; at < nbytes && !is_lost(); at += kPiece) {
    const Lock lock(mutex);
    const size_t n = std::min(kPiece, nbytes - at);
    uint64_t offset;
    const Allocation* allocation = find(device + at, n, &offset);
    if (allocation == nullptr) {
      context->is_lost = true;
      break;
    }
    uint8_t* behind = allocation->behind + offset;
    std::memcpy(is_to_device ? behind : host + at, is_to_device ? host + at : behind, n);
    counts.copied_bytes += static_cast<int64_t>(n);
  }
  const Lock lock(mutex);
  --counts.queued;
}

int queue_copy(const char* call, uint64_t device, void* host, size_t nbytes, CUstream_st* handle,
               bool is_to_device) {
  Context* context;
  if (const int result = check(call, &context)) return result;
  const std::shared_ptr<CUstream_st> stream = stream_of(handle);
  if (!stream || stream->context != context) return kInvalidHandle;
  {
    const Lock lock(mutex);
    uint64_t offset;
    const Allocation* allocation = find(device, nbytes, &offset);
    if (allocation == nullptr || allocation->device != context->device) return kInvalidValue;
    if (!is_locked(host, nbytes)) return kInvalidValue;
    ++(is_to_device ? counts.copies_to_device : counts.copies_to_host);
    ++counts.queued;
  }
  stream->add([=, n_losses = context->n_losses.load()] {
    copy_now(context, n_losses, device, static_cast<uint8_t*>(host), nbytes, is_to_device);
  });
  return kSuccess;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// --- CUDA's calls

EXPORT int cuInit(unsigned) {
  if (const int result = asked_for("cuInit")) return result;
  is_initialized = true;
  return kSuccess;
}

EXPORT int cuDriverGetVersion(int* version) {
  *version = 12040;
  return kSuccess;
}

EXPORT int cuDeviceGetCount(int* n) {
  *n = kDevices;
  return is_initialized ? kSuccess : kNotInitialized;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
  if (!is_initialized) return kNotInitialized;
  if (ordinal < 0 || ordinal >= kDevices) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

EXPORT int cuDeviceGetName(char* name, int length, int device) {
  const std::string text = "emulated device " + std::to_string(device);
  std::strncpy(name, text.c_str(), static_cast<size_t>(length) - 1);
  name[length - 1] = '\0';
  return kSuccess;
}

EXPORT int cuPointerGetAttributes(unsigned n, int* attributes, void** data, uint64_t pointer) {
  if (!is_initialized) return kNotInitialized;
  const Lock lock(mutex);
  uint64_t offset = 0;
  const Allocation* allocation = find(pointer, 1, &offset);
  for (unsigned i = 0; i < n; ++i) {
    switch (attributes[i]) {
      case 1:
        *static_cast<Context**>(data[i]) = allocation ? &contexts[allocation->device] : nullptr;
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
  if (!is_initialized) return kNotInitialized;
  if (device < 0 || device >= kDevices) return kInvalidDevice;
  if (const int result = asked_for("cuDevicePrimaryCtxRetain")) return result;
  const Lock lock(mutex);
  *context = &contexts[device];
  ++contexts[device].n_retained;
  return kSuccess;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
  const Lock lock(mutex);
  if (contexts[device].n_retained == 0) return kInvalidContext;
  --contexts[device].n_retained;
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

EXPORT int cuMemHostRegister_v2(void* host, size_t nbytes, unsigned) {
  Context* context;
  if (const int result = check("cuMemHostRegister", &context)) return result;
  const Lock lock(mutex);
  if (is_locked(host, 1)) return kAlreadyRegistered;
  locked[reinterpret_cast<uint64_t>(host)] = nbytes;
  counts.locked_bytes += static_cast<int64_t>(nbytes);
  return kSuccess;
}

EXPORT int cuMemHostUnregister(void* host) {
  const Lock lock(mutex);
  const auto found = locked.find(reinterpret_cast<uint64_t>(host));
  if (found == locked.end()) return kNotRegistered;
  counts.locked_bytes -= static_cast<int64_t>(found->second);
  locked.erase(found);
  return kSuccess;
}

EXPORT int cuStreamCreate(CUstream_st** stream, unsigned) {
  Context* context;
  if (const int result = check("cuStreamCreate", &context)) return result;
  auto made = std::make_shared<CUstream_st>(context);
  const Lock lock(mutex);
  *stream = made.get();
  handles[made.get()] = std::move(made);
  ++counts.streams;
  return kSuccess;
}

EXPORT int cuStreamDestroy_v2(CUstream_st* stream) {
  std::shared_ptr<CUstream_st> dying;  // joins its thread without the lock
  const Lock lock(mutex);
  const auto found = handles.find(stream);
  if (found == handles.end()) return kInvalidHandle;
  dying = std::move(found->second);
  handles.erase(found);
  --counts.streams;
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
  return queue_copy("cuMemcpyHtoDAsync", to, const_cast<void*>(from), nbytes, stream, true);
}

EXPORT int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t nbytes, CUstream_st* stream) {
  return queue_copy("cuMemcpyDtoHAsync", from, to, nbytes, stream, false);
}

EXPORT int cuEventCreate(CUevent_st** event, unsigned) {
  Context* context;
  if (const int result = check("cuEventCreate", &context)) return result;
  *event = new CUevent_st{context, {}, {}};
  const Lock lock(mutex);
  events.insert(*event);
  ++counts.events;
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
  if (is_lying) return kSuccess;
  const std::lock_guard lock(event->mutex);
  const auto stream = event->stream.lock();
  const bool is_done = !stream || stream->n_done() >= event->n;
  if (event->context->is_lost) return kLaunchFailed;  // by what has just been done
  return is_done ? kSuccess : kNotReady;
}

EXPORT int cuEventDestroy_v2(CUevent_st* event) {
  {
    const Lock lock(mutex);
    if (events.erase(event) == 0) return kInvalidHandle;
    --counts.events;
  }
  delete event;
  return kSuccess;
}

EXPORT int cuGetErrorName(int error, const char** name) {
  static const std::map<int, const char*> names = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},     {2, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"}, {100, "CUDA_ERROR_NO_DEVICE"},
      {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},   {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},   {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"},
  };
  const auto found = names.find(error);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kInvalidValue : kSuccess;
}

EXPORT int cuGetErrorString(int, const char** text) {
  *text = "emulated";
  return kSuccess;
}

// --- the tests' calls

EXPORT uint64_t fake_cuda_allocate(int device, size_t nbytes) {
  cuInit(0);
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t mapped = (nbytes + page - 1) / page * page;
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(mapped)) != 0) return 0;
  void* shown = mmap(nullptr, mapped, PROT_NONE, MAP_SHARED, fd, 0);
  void* behind = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (shown == MAP_FAILED || behind == MAP_FAILED) return 0;
  const Lock lock(mutex);
  allocations[reinterpret_cast<uint64_t>(shown)] = {device, nbytes, static_cast<uint8_t*>(behind)};
  ++contexts[device].n_retained;  // who allocates has a context
  return reinterpret_cast<uint64_t>(shown);
}

EXPORT int fake_cuda_free(uint64_t address) {
  const Lock lock(mutex);
  const auto found = allocations.find(address);
  if (found == allocations.end()) return kInvalidValue;
  --contexts[found->second.device].n_retained;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t mapped = (found->second.nbytes + page - 1) / page * page;
  munmap(reinterpret_cast<void*>(address), mapped);
  munmap(found->second.behind, mapped);
  allocations.erase(found);
  return kSuccess;
}

EXPORT int fake_cuda_write(uint64_t to, const void* from, size_t nbytes) {
  const Lock lock(mutex);
  uint64_t offset;
  const Allocation* allocation = find(to, nbytes, &offset);
  if (allocation == nullptr) return kInvalidValue;
  std::memcpy(allocation->behind + offset, from, nbytes);
  return kSuccess;
}

EXPORT int fake_cuda_read(void* to, uint64_t from, size_t nbytes) {
  const Lock lock(mutex);
  uint64_t offset;
  const Allocation* allocation = find(from, nbytes, &offset);
  if (allocation == nullptr) return kInvalidValue;
  std::memcpy(to, allocation->behind + offset, nbytes);
  return kSuccess;
}

EXPORT uint64_t fake_cuda_stream(int device) {
  auto made = std::make_shared<CUstream_st>(&contexts[device]);
  const Lock lock(mutex);
  const auto handle = reinterpret_cast<uint64_t>(made.get());
  handles[made.get()] = std::move(made);
  ++counts.streams;
  return handle;
}

EXPORT int fake_cuda_destroy_stream(uint64_t handle) {
  return cuStreamDestroy_v2(reinterpret_cast<CUstream_st*>(handle));
}

EXPORT int fake_cuda_launch_fill(uint64_t handle, uint64_t to, uint8_t value, size_t nbytes, int delay_us) {
  current.push_back(&contexts[0]);  // for the default streams
  const auto stream = stream_of(reinterpret_cast<CUstream_st*>(handle));
  current.pop_back();
  if (!stream) return kInvalidHandle;
  {
    const Lock lock(mutex);
    ++counts.queued;
  }
  stream->add([=] {
    wait_until_let_go(&are_kernels_held);
    pause(delay_us);
    const std::vector<uint8_t> bytes(nbytes, value);
    fake_cuda_write(to, bytes.data(), nbytes);
    const Lock lock(mutex);
    --counts.queued;
  });
  return kSuccess;
}

EXPORT void fake_cuda_fail(const char* call, int n, int result, int stays) {
  const Lock lock(mutex);
  if (n == 0) {
    failures.clear();
  } else {
    failures[call] = {n, result, stays != 0};
  }
}

EXPORT void fake_cuda_lose(int device) {
  ++contexts[device].n_losses;
  contexts[device].is_lost = true;
}

EXPORT void fake_cuda_delay_copies(int us) {
  copy_delay_us = us;
}

EXPORT void fake_cuda_hold(int copies, int kernels) {
  {
    const std::lock_guard lock(holding);
    are_copies_held = copies != 0;
    are_kernels_held = kernels != 0;
  }
  let_go.notify_all();
}

EXPORT void fake_cuda_lie_about_events(int lying) {
  is_lying = lying != 0;
}

EXPORT void fake_cuda_counts(FakeCudaCounts* out) {
  const Lock lock(mutex);
  *out = counts;
  out->contexts = contexts[0].n_retained + contexts[1].n_retained;
}

EXPORT void fake_cuda_reset() {
  fake_cuda_hold(0, 0);
  fake_cuda_delay_copies(0);
  fake_cuda_lie_about_events(0);
  fake_cuda_fail("", 0, 0, 0);
  for (Context& context : contexts) context.is_lost = false;
}
