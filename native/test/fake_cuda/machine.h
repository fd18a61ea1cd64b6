// The machine that the emulated driver drives: devices' memory, streams with a thread each, and what tests
// have asked for. An emulated driver of NVIDIA's for machines without one: the calls that p2pkv binds
// (driver_calls.cc), with device memory that a processor can't touch, copies that happen later and on another
// thread, and errors on demand (test_calls.cc). Stricter than the real one where that finds mistakes: copies
// from or to memory that is not page-locked are refused.
//
// Its own code throughout: nothing but names, types and numbers is CUDA's.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_cuda.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

struct CUstream_st;

namespace fake {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kNotInitialized = 3;
constexpr int kNoDevice = 100;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidContext = 201;
constexpr int kInvalidHandle = 400;
constexpr int kNotFound = 500;
constexpr int kNotReady = 600;
constexpr int kAlreadyRegistered = 712;
constexpr int kNotRegistered = 713;
constexpr int kLaunchFailed = 719;
constexpr int kNotSupported = 801;
constexpr int kDevices = 2;  // at most
constexpr int kVersion = 12080;

struct Context {
  int device;
  int n_retained = 0;
  std::atomic<bool> is_lost = false;
  std::atomic<int> n_losses = 0;
};

// A GPU, or a compute instance of one that is in MIG mode (devices.cc).
struct VisibleDevice {
  std::string gpu_uuid;
  std::string mig_uuid;  // empty: it is a whole GPU
  uint64_t memory;       // of its GPU instance, or 0: it may be shared with whoever has the same number
};
std::vector<VisibleDevice> visible_devices();
// Whether memory of a device with that number is out of this one's reach. Which error a real driver gives
// then NVIDIA does not say.
bool is_of_other_instance(uint64_t memory, int device);

// What all processes know of memory that is shared by a handle. Lies in a page behind the memory.
struct Fate {
  std::atomic<int> n_mappings;  // of other processes
  std::atomic<int> is_freed;
};

// What a device may do with memory, as cuMemSetAccess says it.
constexpr int kMayNothing = 0;
constexpr int kMayRead = 1;
constexpr int kMayReadAndWrite = 3;

struct Allocation {
  int device;
  size_t nbytes;
  uint8_t* behind;          // the same memory, where copies and kernels reach it
  int fd = -1;              // of the memory
  bool is_virtual = false;  // made by cuMemCreate: shared by a descriptor, not by a handle
  int access = kMayReadAndWrite;
  Fate* fate = nullptr;  // of memory that is shared by a handle
};

// cuMemGenericAllocationHandle.
struct Physical {
  int fd;
  size_t nbytes;
};

// Another process's memory that was opened by its handle, by process and inode.
struct Opened {
  uint64_t address;
  int n_times;
};

enum class Way { kToDevice, kToHost, kWithin };

struct Copy {
  uint64_t to;
  uint64_t from;
  size_t nbytes;
  Way way = Way::kWithin;  // as the addresses say
};

struct Failure {
  int n;
  int result;
  bool stays;
};

// Never destroyed: streams' threads may still run when the process ends.
struct Machine {
  std::recursive_mutex mutex;  // guards all below, but what is atomic
  const std::vector<VisibleDevice> devices = visible_devices();
  Context contexts[kDevices] = {{0}, {1}};
  std::map<uint64_t, Allocation> allocations;
  std::map<uint64_t, size_t> locked;  // page-locked host memory
  std::map<uint64_t, Physical> physical;
  std::map<uint64_t, size_t> reserved;  // addresses
  std::map<std::pair<int, uint64_t>, Opened> opened;
  uint64_t last_physical = 0;
  std::set<const void*> events;
  std::map<const void*, std::shared_ptr<CUstream_st>> streams;
  std::map<std::pair<Context*, int>, std::shared_ptr<CUstream_st>> default_streams;  // made when needed
  std::map<std::string, Failure> failures;
  FakeCudaCounts counts{};
  std::atomic<bool> is_initialized = false;
  std::atomic<int> copy_delay_us = 0;
  std::atomic<bool> is_lying = false;
  bool is_corrupting = false;  // for good

  std::mutex holding;  // guards the three below
  bool are_copies_held = false;
  int n_let_through = 0;  // copies that are begun although they are held
  bool are_kernels_held = false;
  std::condition_variable let_go;
};
extern Machine& machine;

inline thread_local std::vector<Context*> current;
inline thread_local int capture_mode = 0;

using Lock = std::lock_guard<std::recursive_mutex>;

inline bool has_device(int ordinal) {
  return ordinal >= 0 && static_cast<size_t>(ordinal) < machine.devices.size();
}

// The allocation that holds all of these bytes. With the lock.
const Allocation* find(uint64_t address, size_t nbytes, uint64_t* offset);
bool is_locked(const void* host, size_t nbytes);
// What a test has asked this call to give, or kSuccess.
int asked_for(const char* call);
// Of every call that needs a context: the current one, in working order.
int check(const char* call, Context** context);
// 1 is the legacy default stream, 2 the thread's. One a context is enough for both.
std::shared_ptr<CUstream_st> stream_of(CUstream_st* handle);
void pause(int us);
void wait_until_let_go(const bool* is_held);
// The same for a copy.
void wait_to_copy();
// Rounded up to whole pages.
size_t to_pages(size_t nbytes);
// A memfd that says whose memory it is: a descriptor is all that an importer gets.
int make_memfd(int device);
// `VisibleDevice::memory` of a memfd's device; of a test's own memfd, which may be any's, that of `device`.
uint64_t memory_of(int fd, int device);
// 0 if there is none.
uint64_t allocate(int device, size_t nbytes, bool is_virtual);
int free_now(uint64_t address);
// Has a stream make copies, in any order. `failed`: which can't be, if one.
int launch(const char* call, std::vector<Copy> copies, CUstream_st* handle, size_t* failed);

}  // namespace fake

struct CUstream_st {
  explicit CUstream_st(fake::Context* context) : context(context), thread([this] { run(); }) {}
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

  fake::Context* const context;

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
  fake::Context* context;
  std::mutex mutex;
  std::weak_ptr<CUstream_st> stream;
  uint64_t n = 0;  // done when the stream has done so much
};
