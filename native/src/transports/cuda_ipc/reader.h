// The reader's side of the cuda_ipc transport: maps an owner's device memory and copies out of it, from
// device to device. What lies in host memory an endpoint of shm reads.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "page/region.h"
#include "transports/batch_endpoint.h"
#include "transports/cuda_ipc/frames.h"
#include "transports/cuda_ipc/hold.h"
#include "transports/cuda_ipc/memory.h"

namespace p2pkv::cuda_ipc {

// A peer's region of device memory. All but the sizes is guarded by the endpoint's mutex.
class DeviceRegion final : public AttachedRegion {
 public:
  using AttachedRegion::AttachedRegion;

  bool is_answered = false;
  bool is_refused = false;
  cuda::SharedRange range{};
  UniqueFd fd;
  bool wants_words = false;  // their packet has not come yet
  std::shared_ptr<ReadOnlyMapping> words;
  Deadline::Clock::time_point unmappable_until{};
};

// What the endpoint needs of its transport, which it keeps alive.
struct CudaIpcHome {
  std::shared_ptr<Transport> transport;
  RegionServer* server;
  HangUps* hang_ups;
};

// Reads device memory. The connection is made and the regions are asked for without blocking; the replies are
// taken when the first read needs them.
class DeviceEndpoint final : public BatchEndpoint {
 public:
  explicit DeviceEndpoint(CudaIpcHome home);
  ~DeviceEndpoint() override { close(); }

  std::shared_ptr<RemoteRegion> attach(std::string_view region, std::string* error) override;

  enum class Progress { kReady, kWaiting, kRefused, kLost };
  // Connects, asks and takes replies as far as possible without blocking; what is needed to map the region,
  // if it is there by now.
  Progress poll(DeviceRegion& region);
  // The mapping, made now if there is none yet; null: the owner is lost, or the device can't map its memory.
  std::shared_ptr<Mapped> mapping(DeviceRegion& region, const std::shared_ptr<cuda::Device>& device,
                                  bool* is_lost);
  // Blocks until something may have changed. Only for the thread that drives the batch.
  void wait_for_owner(const Deadline& deadline);

 protected:
  std::string make_half() override;
  bool take_half(std::string_view remote, std::string* error) override;
  std::shared_ptr<Batch> make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) override;
  void shutdown_sockets() override;
  void release() override;

 private:
  using Clock = Deadline::Clock;

  // With mutex_ held; false once the owner is lost.
  bool advance();
  bool take_replies(int connection);
  bool take_reply(DeviceRegion& region, int connection, bool* is_complete);

  const CudaIpcHome home_;
  const uint64_t grant_;
  bool is_greeted_ = false;
  EndpointBlob owner_{};
  std::string owner_name_;
  UniqueFd connecting_;                                  // until it is greeted; then
  std::shared_ptr<Hold> hold_;                           // has it
  std::vector<std::weak_ptr<DeviceRegion>> regions_;     // all ever attached
  std::deque<std::shared_ptr<DeviceRegion>> to_ask_;     // not asked for yet
  std::deque<std::shared_ptr<DeviceRegion>> to_answer_;  // asked for, in order
};

// Whoever drives the batch has the device copy, and waits for it.
class DeviceBatch final : public Batch {
 public:
  DeviceBatch(std::shared_ptr<DeviceEndpoint> endpoint, std::shared_ptr<DeviceRegion> remote, Reads reads)
      : Batch(std::move(reads)), endpoint_(std::move(endpoint)), remote_(std::move(remote)) {}
  ~DeviceBatch() override { settle(Status::kCanceled); }

 protected:
  bool drive(const Deadline* deadline) override;
  void interrupt() override { endpoint_->sever(); }
  void quiesce() override {}  // no copy outlives the call that began it

 private:
  struct Part {
    size_t span;
    uint64_t end;  // in the span
  };

  using Clock = Deadline::Clock;

  bool await_region(const Deadline* deadline);
  bool copy_slice();
  bool give_up();
  std::vector<cuda::InnerCopy> cut_parts(uint64_t to, uint64_t from);
  void settle_parts();
  void learn(uint64_t nbytes, std::chrono::duration<double> took);

  const std::shared_ptr<DeviceEndpoint> endpoint_;
  const std::shared_ptr<DeviceRegion> remote_;
  // Of the driving thread alone.
  bool is_ready_ = false;
  size_t next_ = 0;            // the span to go on with
  uint64_t n_copied_ = 0;      // bytes of it
  uint64_t slice_nbytes_ = 0;  // of the next slice
  std::vector<Part> parts_;    // of the slice under way
};

}  // namespace p2pkv::cuda_ipc
