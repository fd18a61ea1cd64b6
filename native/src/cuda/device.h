// Memory of NVIDIA devices: whose an address is, and copies between it and page-locked host memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"

namespace p2pkv::cuda {

// The allocation an address lies in, as the driver knows it.
struct DeviceRange {
  uint64_t start = 0;
  uint64_t nbytes = 0;  // 0: unknown
  int device = 0;       // ordinal
};

// Whether `address` is of device memory of this process. Asks a driver that the process uses already, and
// neither loads nor initializes one: where there is none, no address is.
bool find_device_range(uint64_t address, DeviceRange* range);

// Takes another library than libcuda.so.1 for the driver: a path, or a name that the loader knows. False,
// with the reason in `error`, if one has been loaded already.
bool use_library(const std::string& name, std::string* error);

struct DriverInfo {
  int version = 0;  // 12040 is CUDA 12.4
  std::vector<std::string> devices;
};
// Loads and initializes the driver. False, with what is missing in `error`.
bool describe_driver(DriverInfo* info, std::string* error);

struct DeviceCopy {
  uint64_t device;  // address
  uint8_t* host;
  uint64_t nbytes;
  // The host memory before it was page-locked apart: the driver refuses a copy of both in one.
  bool is_apart = false;
};

// Between two places of devices: of this one, or of others that it reaches.
struct InnerCopy {
  uint64_t to;
  uint64_t from;
  uint64_t nbytes;
};

enum class Direction : uint8_t { kToDevice, kToHost };

// It says what is known of the host memory of copies: a kernel may only touch what is page-locked.
enum class HostMemory : uint8_t { kAny, kLocked };

// It says what is known of both places of copies between devices: a kernel may only touch what lies on its
// own.
enum class InnerMemory : uint8_t { kAny, kOwn };

enum class CopyOutcome : uint8_t {
  kDone = 0,
  kFailed = 1,  // some bytes were not copied; nothing is under way any more
  kLost = 2,    // the device no longer answers for its copies: the host memory must never be used again
};

// Copies that were begun: their memory, on both sides, is theirs until they have ended. One thread at a time.
class CopiesUnderWay {
 public:
  // Waits for them where nobody has.
  virtual ~CopiesUnderWay() = default;
  // Blocks until the last byte has arrived, however long that takes: a copy that was begun can't be called
  // back. Then it says the same again. `error` is emptied, or gets the reason.
  virtual CopyOutcome wait(std::string* error) = 0;
};

enum class StreamOutcome : uint8_t { kDone = 0, kFailed = 1, kTimedOut = 2 };

// What was queued on a stream at one moment. One thread at a time.
class StreamMark {
 public:
  virtual ~StreamMark() = default;
  // Waits until it has been done. May be asked again after a time-out.
  virtual StreamOutcome wait(const Deadline& deadline, std::string* error) = 0;
};

// A stream of p2pkv's own, in the device's primary context. What is queued on it goes on when it is
// destroyed.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual uint64_t handle() const = 0;  // a CUstream, which CUDA's runtime takes as well
};

// One device, used through its primary context, as torch, CuPy and JAX do. Thread-safe; no call needs or
// changes the calling thread's current context, and none ends another thread's capture of a CUDA graph.
class Device : public std::enable_shared_from_this<Device> {
 public:
  // One object a device and process, for as long as somebody has it. Null, with the reason in `error`.
  static std::shared_ptr<Device> open(int ordinal, std::string* error);
  virtual ~Device() = default;

  virtual int ordinal() const = 0;
  // Begins copies, and returns without waiting for them: never null, what can't be begun has failed. The host
  // memory should be page-locked (Staging): otherwise the driver copies it once more. What lies in a row on
  // both sides is copied as one; in which order copies of one call are made nobody knows. Device memory that
  // was written is seen by kernels launched after they have ended.
  virtual std::unique_ptr<CopiesUnderWay> begin_copy(std::span<const DeviceCopy> copies, Direction direction,
                                                     HostMemory host = HostMemory::kAny) = 0;
  // The same, and waits for them.
  CopyOutcome copy(std::span<const DeviceCopy> copies, Direction direction, std::string* error,
                   HostMemory host = HostMemory::kAny) {
    return begin_copy(copies, direction, host)->wait(error);
  }
  // Has small pieces of locked memory and of the device's own copied by a kernel of so many blocks from now
  // on (PieceKernel), for all who use the device in this process. False, with the reason in `error`, if they
  // go on as before.
  virtual bool lend_blocks(unsigned n_blocks, std::string* error) = 0;
  // Copies between devices, and waits for them. After kLost bytes may still be written to `to`.
  virtual CopyOutcome copy_within(std::span<const InnerCopy> copies, InnerMemory memory,
                                  std::string* error) = 0;
  // Marks what has been queued on a stream until now. 0 and 1 are the legacy default stream, 2 the calling
  // thread's default stream, as in __cuda_array_interface__; else a stream's handle. Null, with the reason in
  // `error`.
  virtual std::unique_ptr<StreamMark> mark(uint64_t stream, std::string* error) = 0;
  // Waits until everything queued on a stream before this call has been done.
  StreamOutcome wait_for(uint64_t stream, const Deadline& deadline, std::string* error) {
    const std::unique_ptr<StreamMark> queued = mark(stream, error);
    return queued ? queued->wait(deadline, error) : StreamOutcome::kFailed;
  }
  // Null, with the reason in `error`. It does not wait for the legacy default stream.
  virtual std::unique_ptr<Stream> open_stream(std::string* error) = 0;
  // Calls `body` with the device's context as the thread's current one, for a library that looks there for
  // its device. False, with the reason in `error`, if it was not called.
  virtual bool run_inside(const std::function<void()>& body, std::string* error) = 0;
  // Page-locks memory for all devices. The same memory may be locked several times, by whoever needs it, and
  // stays so until each has unlocked it. `is_read_only`: this process can't write to it, and so devices
  // don't.
  virtual bool lock_memory(void* host, uint64_t nbytes, std::string* error, bool is_read_only = false) = 0;
  virtual void unlock_memory(void* host) = 0;
  // Where the device finds page-locked memory. False, with the reason in `error`, if it doesn't.
  virtual bool find_address(void* host, uint64_t* address, std::string* error) = 0;
  // Whether copies that don't lie in a row go many to a launch; else each costs a launch of its own.
  virtual bool gathers_copies() const = 0;
  // Whether its context has broken; then nothing can be copied any more.
  virtual bool is_lost() const = 0;
};

}  // namespace p2pkv::cuda
