#include "cuda/device.h"

#include <unistd.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "cuda/driver.h"

namespace p2pkv::cuda {
namespace {

// A copy of a few MiB takes some 100 us: that long a core is worth less than the delay of being woken.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kFirstNap = std::chrono::microseconds(20);
constexpr auto kLongestNap = std::chrono::microseconds(500);
constexpr uint64_t kLegacyStream = 1;
constexpr uint64_t kThreadStream = 2;
constexpr size_t kInnerStream = 2;

// Asks until the event's work is done, has failed, or the deadline (none: never) has passed; that it has is
// kNotReady. First in a spin, then with naps.
Result await_event(const Driver& driver, EventHandle event, const Deadline* deadline) {
  const auto began = Deadline::Clock::now();
  auto nap = kFirstNap;
  while (true) {
    const Result result = driver.event_query(event);
    if (result != kNotReady) return result;
    if (deadline != nullptr && deadline->passed()) return kNotReady;
    if (Deadline::Clock::now() - began < kSpin) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(nap);
    nap = std::min(2 * nap, kLongestNap);
  }
}

class EventMark final : public StreamMark {
 public:
  EventMark(const Driver& driver, std::shared_ptr<Device> device, ContextHandle context, EventHandle event)
      : driver_(driver), device_(std::move(device)), context_(context), event_(event) {}

  ~EventMark() override {
    if (getpid() != pid_) return;  // in a forked child no driver call works
    const CurrentContext current(driver_, context_);
    driver_.event_destroy(event_);  // may be done before the event has come
  }

  StreamOutcome wait(const Deadline& deadline, std::string* error) override {
    const CurrentContext current(driver_, context_);
    Result result = current.result();
    if (result == kSuccess) result = await_event(driver_, event_, &deadline);
    if (result == kSuccess) return StreamOutcome::kDone;
    if (result == kNotReady) return StreamOutcome::kTimedOut;
    *error = "CUDA device " + std::to_string(device_->ordinal()) + ": " +
             driver_.describe("waiting for a stream", result);
    return StreamOutcome::kFailed;
  }

 private:
  const Driver& driver_;
  const std::shared_ptr<Device> device_;  // keeps the context
  const ContextHandle context_;
  const EventHandle event_;
  const pid_t pid_ = getpid();
};

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

// What has been page-locked, and how often: the driver refuses the same memory a second time.
class Locked {
 public:
  static Locked& get() {
    static Locked& all = *new Locked;  // never destroyed: memory may be unlocked when the process ends
    return all;
  }

  template <typename Register>
  Result lock(void* host, uint64_t nbytes, Register do_register) {
    const std::lock_guard lock(mutex_);
    if (const auto known = blocks_.find(host); known != blocks_.end() && known->second.nbytes == nbytes) {
      ++known->second.n_holders;
      return kSuccess;
    }
    const Result result = do_register();
    if (result == kSuccess) blocks_[host] = {nbytes, 1};
    return result;
  }

  template <typename Unregister>
  void unlock(void* host, Unregister do_unregister) {
    const std::lock_guard lock(mutex_);
    const auto known = blocks_.find(host);
    if (known == blocks_.end() || --known->second.n_holders > 0) return;
    blocks_.erase(known);
    do_unregister();
  }

 private:
  struct Block {
    uint64_t nbytes;
    int n_holders;
  };
  std::mutex mutex_;  // guards blocks_, and is held for the driver's call: its answer must be what they say
  std::map<void*, Block> blocks_;
};

class PrimaryContextDevice final : public Device {
 public:
  PrimaryContextDevice(const Driver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {}

  ~PrimaryContextDevice() override {
    // In a forked child no driver call works. Otherwise what fails is of a context or a driver that is gone.
    if (getpid() != pid_ || context_ == nullptr) return;
    {
      const CurrentContext current(driver_, context_);
      if (current.result() == kSuccess) {
        for (EventHandle event : idle_events_) driver_.event_destroy(event);
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

  CopyOutcome copy(std::span<const DeviceCopy> copies, Direction direction, std::string* error) override {
    const StreamHandle stream = streams_[static_cast<size_t>(direction)];
    return run_on(stream, [&] { return queue(copies, direction, stream, error); }, error);
  }

  CopyOutcome copy_within(std::span<const InnerCopy> copies, std::string* error) override {
    const StreamHandle stream = streams_[kInnerStream];
    return run_on(stream, [&] { return queue_inner(copies, stream, error); }, error);
  }

  std::unique_ptr<StreamMark> mark(uint64_t stream, std::string* error) override {
    if (stream == 0) stream = kLegacyStream;
    const auto handle = reinterpret_cast<StreamHandle>(stream);
    ContextHandle context = context_;
    if (stream != kLegacyStream && stream != kThreadStream) {
      // an event has to be of its stream's context
      const Result result = driver_.stream_get_context(handle, &context);
      if (result != kSuccess) return no_mark("cuStreamGetCtx", result, error);
    }
    const CurrentContext current(driver_, context);
    if (current.result() != kSuccess) return no_mark("cuCtxPushCurrent", current.result(), error);
    EventHandle event;
    Result result = driver_.event_create(&event, kEventDisableTiming);
    if (result != kSuccess) return no_mark("cuEventCreate", result, error);
    auto made = std::make_unique<EventMark>(driver_, shared_from_this(), context, event);
    result = driver_.event_record(event, handle);
    if (result != kSuccess) return no_mark("cuEventRecord", result, error);
    return made;
  }

  bool lock_memory(void* host, uint64_t nbytes, std::string* error) override {
    const CurrentContext current(driver_, context_);
    if (current.result() != kSuccess) return fail("cuCtxPushCurrent", current.result(), error);
    const Result result = Locked::get().lock(
        host, nbytes, [&] { return driver_.host_register(host, nbytes, kHostRegisterPortable); });
    if (result == kSuccess) return true;
    return fail(("cuMemHostRegister of " + std::to_string(nbytes) + " bytes").c_str(), result, error);
  }

  void unlock_memory(void* host) override {
    if (getpid() != pid_) return;
    const CurrentContext current(driver_, context_);
    if (current.result() == kSuccess) Locked::get().unlock(host, [&] { driver_.host_unregister(host); });
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

  std::unique_ptr<StreamMark> no_mark(const char* call, Result result, std::string* error) const {
    fail(call, result, error);
    return nullptr;
  }

  // Has a stream do what `queue_all` gives it, and waits for that.
  template <typename QueueAll>
  CopyOutcome run_on(StreamHandle stream, const QueueAll& queue_all, std::string* error) {
    if (is_lost_) {
      *error = name() + " was lost by an earlier error";
      return CopyOutcome::kFailed;
    }
    const CurrentContext current(driver_, context_);
    Result result = current.result();
    if (result != kSuccess) {
      fail("cuCtxPushCurrent", result, error);
      return CopyOutcome::kFailed;
    }
    EventHandle event;
    if (!take_event(&event, error)) return CopyOutcome::kFailed;
    const bool is_queued = queue_all();
    // Whatever was queued before it failed must have ended before anybody else gets the memory.
    result = driver_.event_record(event, stream);
    if (result == kSuccess) result = await_event(driver_, event, nullptr);
    if (result == kSuccess) {
      give_back(event);
      return is_queued ? CopyOutcome::kDone : CopyOutcome::kFailed;
    }
    // Neither recording nor asking fails while a context is sound: nothing it says can be relied on any more.
    is_lost_ = true;
    fail("waiting for copies", result, error);
    driver_.event_destroy(event);
    return CopyOutcome::kLost;
  }

  bool queue_inner(std::span<const InnerCopy> copies, StreamHandle stream, std::string* error) {
    for (size_t i = 0; i < copies.size();) {
      const InnerCopy& first = copies[i];
      uint64_t nbytes = 0;
      do {
        nbytes += copies[i++].nbytes;
      } while (i < copies.size() && copies[i].to == first.to + nbytes &&
               copies[i].from == first.from + nbytes);
      if (nbytes == 0) continue;
      const Result result = driver_.copy_on_devices(first.to, first.from, nbytes, stream);
      if (result == kSuccess) continue;
      return fail(("cuMemcpyDtoDAsync of " + std::to_string(nbytes) + " bytes").c_str(), result, error);
    }
    return true;
  }

  bool queue(std::span<const DeviceCopy> copies, Direction direction, StreamHandle stream,
             std::string* error) {
    for (size_t i = 0; i < copies.size();) {
      const DeviceCopy& first = copies[i];
      uint64_t nbytes = 0;
      do {
        nbytes += copies[i++].nbytes;
      } while (i < copies.size() && copies[i].device == first.device + nbytes &&
               copies[i].host == first.host + nbytes);
      if (nbytes == 0) continue;
      const bool is_to_device = direction == Direction::kToDevice;
      const Result result = is_to_device ? driver_.copy_to_device(first.device, first.host, nbytes, stream)
                                         : driver_.copy_to_host(first.host, first.device, nbytes, stream);
      if (result == kSuccess) continue;
      const std::string call = std::string(is_to_device ? "cuMemcpyHtoDAsync" : "cuMemcpyDtoHAsync") +
                               " of " + std::to_string(nbytes) + " bytes";
      return fail(call.c_str(), result, error);
    }
    return true;
  }

  bool take_event(EventHandle* event, std::string* error) {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_events_.empty()) {
        *event = idle_events_.back();
        idle_events_.pop_back();
        return true;
      }
    }
    const Result result = driver_.event_create(event, kEventDisableTiming);
    return result == kSuccess || fail("cuEventCreate", result, error);
  }

  void give_back(EventHandle event) {
    const std::lock_guard lock(mutex_);
    idle_events_.push_back(event);
  }

  const Driver& driver_;
  const int ordinal_;
  const pid_t pid_ = getpid();
  DeviceHandle handle_ = 0;
  ContextHandle context_ = nullptr;
  // Each direction has a stream, as a device copies both ways at a time, and copies between devices have one.
  StreamHandle streams_[3] = {};
  std::atomic<bool> is_lost_ = false;
  std::mutex mutex_;                      // guards idle_events_
  std::vector<EventHandle> idle_events_;  // as many as there were copies at a time
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
