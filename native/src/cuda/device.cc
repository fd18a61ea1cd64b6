#include "cuda/device.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/driver.h"
#include "cuda/events.h"
#include "cuda/launches.h"
#include "cuda/locked_memory.h"

namespace p2pkv::cuda {
namespace {

constexpr uint64_t kLegacyStream = 1;
constexpr uint64_t kThreadStream = 2;
// By what is copied: to the device and to the host, as a device copies both ways at a time, and within it.
constexpr size_t kWithin = 2;
constexpr size_t kWays = 3;
// Two of each, so that a call's few bytes don't wait behind another's many. A guess; not tuned.
constexpr size_t kStreamsEach = 2;

class OwnStream final : public Stream {
 public:
  OwnStream(const Driver& driver, std::shared_ptr<Device> device, ContextHandle context, StreamHandle stream)
      : driver_(driver), device_(std::move(device)), context_(context), stream_(stream) {}

  ~OwnStream() override {
    if (getpid() != pid_) return;  // in a forked child no driver call works
    const CurrentContext current(driver_, context_);
    if (current.result() == kSuccess) driver_.stream_destroy(stream_);
  }

  uint64_t handle() const override { return reinterpret_cast<uint64_t>(stream_); }

 private:
  const Driver& driver_;
  const std::shared_ptr<Device> device_;  // keeps the context
  const ContextHandle context_;
  const StreamHandle stream_;
  const pid_t pid_ = getpid();
};

// Copies that were not begun.
class NoCopies final : public CopiesUnderWay {
 public:
  explicit NoCopies(std::string error) : error_(std::move(error)) {}
  CopyOutcome wait(std::string* error) override {
    *error = error_;
    return CopyOutcome::kFailed;
  }

 private:
  const std::string error_;
};

class PrimaryContextDevice final : public Device {
 public:
  PrimaryContextDevice(const Driver& driver, int ordinal)
      : driver_(driver), ordinal_(ordinal), events_(driver), launches_(driver) {}

  ~PrimaryContextDevice() override {
    // In a forked child no driver call works. Otherwise what fails is of a context or a driver that is gone.
    if (getpid() != pid_ || context_ == nullptr) return;
    {
      const CurrentContext current(driver_, context_);
      if (current.result() == kSuccess) {
        events_.end();
        launches_.end();
        for (StreamHandle stream : streams_) {
          if (stream != nullptr) driver_.stream_destroy(stream);
        }
      }
    }
    driver_.primary_context_release(handle_);
  }

  bool start(std::string* error) {
    Result result = driver_.device_get(&handle_, ordinal_);
    if (result != kSuccess) return fail("cuDeviceGet", result, error);
    result = driver_.primary_context_retain(&context_, handle_);
    if (result != kSuccess) return fail("cuDevicePrimaryCtxRetain", result, error);
    const CurrentContext current(driver_, context_);
    if (current.result() != kSuccess) return fail("cuCtxPushCurrent", current.result(), error);
    for (StreamHandle& stream : streams_) {
      result = driver_.stream_create(&stream, kStreamNonBlocking);
      if (result != kSuccess) return fail("cuStreamCreate", result, error);
    }
    return true;
  }

  int ordinal() const override { return ordinal_; }
  bool is_lost() const override { return is_lost_; }
  bool gathers_copies() const override { return launches_.are_gathered(); }

  std::unique_ptr<CopiesUnderWay> begin_copy(std::span<const DeviceCopy> copies, Direction direction,
                                             HostMemory host) override {
    return begin(static_cast<size_t>(direction), [&](StreamHandle stream, std::string* error) {
      return launches_.launch(copies, direction, host, stream, error);
    });
  }

  bool lend_blocks(unsigned n_blocks, std::string* error) override {
    const CurrentContext current(driver_, context_);
    if (current.result() != kSuccess) return fail("cuCtxPushCurrent", current.result(), error);
    std::string why;
    if (launches_.kernel().lend(handle_, n_blocks, &why)) return true;
    *error = name() + ": " + why;
    return false;
  }

  CopyOutcome copy_within(std::span<const InnerCopy> copies, InnerMemory memory,
                          std::string* error) override {
    const auto launch = [&](StreamHandle stream, std::string* why) {
      return launches_.launch_within(copies, memory, stream, why);
    };
    return begin(kWithin, launch)->wait(error);
  }

  std::unique_ptr<StreamMark> mark(uint64_t stream, std::string* error) override {
    if (stream == 0) stream = kLegacyStream;
    const auto handle = reinterpret_cast<StreamHandle>(stream);
    ContextHandle context = context_;
    if (stream != kLegacyStream && stream != kThreadStream) {
      // an event has to be of its stream's context
      const Result result = driver_.stream_get_context(handle, &context);
      if (result != kSuccess) {
        fail("cuStreamGetCtx", result, error);
        return nullptr;
      }
    }
    return mark_stream(driver_, shared_from_this(), context, handle, error);
  }

  bool lock_memory(void* host, uint64_t nbytes, std::string* error, bool is_read_only) override {
    const CurrentContext current(driver_, context_);
    if (current.result() != kSuccess) return fail("cuCtxPushCurrent", current.result(), error);
    const unsigned flags = kHostRegisterPortable | (is_read_only ? kHostRegisterReadOnly : 0);
    const Result result =
        LockedMemory::get().lock(host, nbytes, [&] { return driver_.host_register(host, nbytes, flags); });
    if (result == kSuccess) return true;
    return fail(("cuMemHostRegister of " + std::to_string(nbytes) + " bytes").c_str(), result, error);
  }

  void unlock_memory(void* host) override {
    if (getpid() != pid_) return;
    const CurrentContext current(driver_, context_);
    // Forgotten in any case: other memory may come to lie there.
    LockedMemory::get().unlock(host, [&] {
      if (current.result() == kSuccess) driver_.host_unregister(host);
    });
  }

  bool find_address(void* host, uint64_t* address, std::string* error) override {
    const CurrentContext current(driver_, context_);
    if (current.result() != kSuccess) return fail("cuCtxPushCurrent", current.result(), error);
    const Result result = driver_.host_get_device_pointer(address, host, 0);
    return result == kSuccess || fail("cuMemHostGetDevicePointer", result, error);
  }

  std::unique_ptr<Stream> open_stream(std::string* error) override {
    const CurrentContext current(driver_, context_);
    StreamHandle stream = nullptr;
    Result result = current.result();
    if (result == kSuccess) result = driver_.stream_create(&stream, kStreamNonBlocking);
    if (result == kSuccess) {
      return std::make_unique<OwnStream>(driver_, shared_from_this(), context_, stream);
    }
    fail("cuStreamCreate", result, error);
    return nullptr;
  }

  bool run_inside(const std::function<void()>& body, std::string* error) override {
    const CurrentContext current(driver_, context_);
    if (current.result() != kSuccess) return fail("cuCtxPushCurrent", current.result(), error);
    body();
    return true;
  }

 private:
  std::string name() const { return "CUDA device " + std::to_string(ordinal_); }

  bool fail(const char* call, Result result, std::string* error) const {
    *error = name() + ": " + driver_.describe(call, result);
    return false;
  }

  // Of copies on a stream of this device. What was launched before one failed must have ended, too, before
  // anybody else gets the memory.
  class Begun final : public CopiesUnderWay {
   public:
    // `failure`: why not all were launched.
    Begun(std::shared_ptr<PrimaryContextDevice> device, EventHandle event, Result recorded,
          std::string failure)
        : device_(std::move(device)), event_(event), recorded_(recorded), failure_(std::move(failure)) {}

    ~Begun() override {
      std::string ignored;
      if (getpid() == pid_) wait(&ignored);  // in a forked child they are the parent's
    }

    CopyOutcome wait(std::string* error) override {
      if (!has_ended_) outcome_ = device_->finish(event_, recorded_, &failure_);
      has_ended_ = true;
      *error = failure_;
      return outcome_;
    }

   private:
    const std::shared_ptr<PrimaryContextDevice> device_;
    const EventHandle event_;
    const Result recorded_;
    std::string failure_;
    bool has_ended_ = false;
    CopyOutcome outcome_ = CopyOutcome::kDone;
    const pid_t pid_ = getpid();
  };

  // Has a stream do what `launch` gives it.
  template <typename Launch>
  std::unique_ptr<CopiesUnderWay> begin(size_t way, const Launch& launch) {
    std::string error = name() + " was lost by an earlier error";
    if (is_lost_) return std::make_unique<NoCopies>(error);
    const CurrentContext current(driver_, context_);
    EventHandle event;
    Result result = current.result();
    if (result != kSuccess) {
      fail("cuCtxPushCurrent", result, &error);
      return std::make_unique<NoCopies>(error);
    }
    result = events_.take(&event);
    if (result != kSuccess) {
      fail("cuEventCreate", result, &error);
      return std::make_unique<NoCopies>(error);
    }
    const StreamHandle stream = streams_[way * kStreamsEach + n_begun_++ % kStreamsEach];
    std::string failure;
    if (!launch(stream, &failure)) failure = name() + ": " + failure;
    result = driver_.event_record(event, stream);
    return std::make_unique<Begun>(own(), event, result, std::move(failure));
  }

  // Waits for the event of copies. `failure` is why they were not all launched, or becomes why they did not
  // end well.
  CopyOutcome finish(EventHandle event, Result result, std::string* failure) {
    const CurrentContext current(driver_, context_);
    if (result == kSuccess) result = current.result();
    if (result == kSuccess) result = await_event(driver_, event, nullptr);
    if (result == kSuccess) {
      events_.give_back(event);
      return failure->empty() ? CopyOutcome::kDone : CopyOutcome::kFailed;
    }
    // Neither recording nor asking fails while a context is sound: nothing it says can be relied on any more.
    is_lost_ = true;
    fail("waiting for copies", result, failure);
    driver_.event_destroy(event);
    return CopyOutcome::kLost;
  }

  std::shared_ptr<PrimaryContextDevice> own() {
    return std::static_pointer_cast<PrimaryContextDevice>(shared_from_this());
  }

  const Driver& driver_;
  const int ordinal_;
  const pid_t pid_ = getpid();
  DeviceHandle handle_ = 0;
  ContextHandle context_ = nullptr;
  std::array<StreamHandle, kWays * kStreamsEach> streams_{};
  std::atomic<size_t> n_begun_ = 0;
  std::atomic<bool> is_lost_ = false;
  Events events_;
  Launches launches_;
};

}  // namespace

bool find_device_range(uint64_t address, DeviceRange* range) {
  const Driver* driver = Driver::get_if_loaded();
  if (driver == nullptr) return false;
  unsigned type = 0;
  void* start = nullptr;
  size_t nbytes = 0;
  int ordinal = -1;
  int attributes[] = {kAttributeMemoryType, kAttributeRangeStart, kAttributeRangeSize,
                      kAttributeDeviceOrdinal};
  void* values[] = {&type, &start, &nbytes, &ordinal};
  // Fails where the driver is loaded and not in use; says 0 of what it does not know. Not every kind of
  // allocation may have a range to tell, but all have the others.
  if (driver->pointer_get_attributes(4, attributes, values, address) != kSuccess) {
    std::swap(attributes[1], attributes[3]);
    std::swap(values[1], values[3]);
    nbytes = 0;
    if (driver->pointer_get_attributes(2, attributes, values, address) != kSuccess) return false;
  }
  if (type != kMemoryTypeDevice || ordinal < 0) return false;
  *range = {reinterpret_cast<uint64_t>(start), nbytes, ordinal};
  return true;
}

bool describe_driver(DriverInfo* info, std::string* error) {
  const Driver* driver = Driver::get(error);
  if (driver == nullptr) return false;
  int n = 0;
  Result result = driver->driver_get_version(&info->version);
  if (result == kSuccess) result = driver->device_get_count(&n);
  if (result != kSuccess) {
    *error = driver->describe("cuDeviceGetCount", result);
    return false;
  }
  for (int ordinal = 0; ordinal < n; ++ordinal) {
    char name[256] = "";
    DeviceHandle handle;
    result = driver->device_get(&handle, ordinal);
    if (result == kSuccess) result = driver->device_get_name(name, sizeof name, handle);
    info->devices.push_back(result == kSuccess ? name : driver->describe("cuDeviceGetName", result));
  }
  return true;
}

std::shared_ptr<Device> Device::open(int ordinal, std::string* error) {
  static std::mutex opening;
  static std::map<int, std::weak_ptr<Device>> devices;
  const Driver* driver = Driver::get(error);
  if (driver == nullptr) return nullptr;
  const std::lock_guard lock(opening);
  if (auto existing = devices[ordinal].lock(); existing && !existing->is_lost()) return existing;
  auto device = std::make_shared<PrimaryContextDevice>(*driver, ordinal);
  if (!device->start(error)) return nullptr;
  devices[ordinal] = device;
  return device;
}

}  // namespace p2pkv::cuda
