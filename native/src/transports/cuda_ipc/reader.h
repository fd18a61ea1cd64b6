// The reader's side of the cuda_ipc transport: maps an owner's device memory and copies out of it, from
// device to device. What lies in host memory an endpoint of shm reads.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "page/region.h"
#include "transports/cuda_ipc/frames.h"
#include "transports/cuda_ipc/hold.h"
#include "transports/cuda_ipc/memory.h"
#include "transports/region_batch.h"
#include "transports/region_endpoint.h"

namespace p2pkv::cuda_ipc {

// A peer's region of device memory.
class DeviceRegion final : public AskedRegion {
 public:
  using AskedRegion::AskedRegion;
  void let_go() override {
    fd.reset();
    words.reset();
  }

  cuda::SharedRange range{};
  UniqueFd fd;
  bool wants_words = false;  // their packet has not come yet
  std::shared_ptr<ReadOnlyMapping> words;
  Deadline::Clock::time_point unmappable_until{};
};

// Why this process could not map a peer's device memory the last time; empty: that has not happened.
std::string refusal();

// What the endpoint needs of its transport, which it keeps alive.
struct CudaIpcHome {
  std::shared_ptr<Transport> transport;
  RegionServer* server;
  HangUps* hang_ups;
};

// Reads device memory.
class DeviceEndpoint final : public RegionEndpoint {
 public:
  explicit DeviceEndpoint(CudaIpcHome home);
  ~DeviceEndpoint() override { close(); }

  // The mapping, made now if there is none yet; null: the owner is lost, or the device can't map its memory.
  std::shared_ptr<Mapped> mapping(DeviceRegion& region, const std::shared_ptr<cuda::Device>& device,
                                  bool* is_lost);

 protected:
  std::string make_half() override;
  bool take_half(std::string_view remote, std::string* error) override;
  std::shared_ptr<AskedRegion> make_region(uint32_t id, uint64_t nbytes) override;
  void keep(std::shared_ptr<OwnerSocket> connection) override;
  std::shared_ptr<OwnerSocket> connection() override;
  bool take_reply(AskedRegion& region, int connection, bool* is_complete) override;
  std::shared_ptr<Batch> make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) override;
  void shutdown_sockets() override;
  void release() override;

 private:
  using Clock = Deadline::Clock;

  const CudaIpcHome home_;
  std::shared_ptr<Hold> hold_;  // once it is greeted
};

// Whoever drives the batch has the device copy, and waits for it.
class DeviceBatch final : public RegionBatch {
 public:
  DeviceBatch(std::shared_ptr<DeviceEndpoint> endpoint, std::shared_ptr<DeviceRegion> remote, Reads reads)
      : RegionBatch(*endpoint, *remote, std::move(reads)),
        endpoint_(std::move(endpoint)),
        remote_(std::move(remote)) {}
  ~DeviceBatch() override { settle(Status::kCanceled); }

 protected:
  // The region is mapped for a slice alone, as its owner may want it back.
  bool begin() override { return true; }
  bool copy_slice(const Deadline* deadline) override;
  bool is_proven(size_t span) const override;
  void quiesce() override {}  // no copy outlives the call that began it

 private:
  using Clock = Deadline::Clock;

  bool give_up();
  std::vector<cuda::InnerCopy> copies_of(uint64_t to, uint64_t from) const;

  const std::shared_ptr<DeviceEndpoint> endpoint_;
  const std::shared_ptr<DeviceRegion> remote_;
};

}  // namespace p2pkv::cuda_ipc
