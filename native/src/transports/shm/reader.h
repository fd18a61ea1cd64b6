// The reader's side of the shm transport: maps an owner's regions and copies out of them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transports/region_batch.h"
#include "transports/region_endpoint.h"
#include "transports/shm/frames.h"
#include "transports/shm/mappings.h"

namespace p2pkv::shm {

// A peer's region. Its mapping arrives with the owner's reply.
class ShmRemoteRegion final : public AskedRegion {
 public:
  using AskedRegion::AskedRegion;
  void let_go() override { mapping.reset(); }

  std::shared_ptr<ReadOnlyMapping> mapping;
};

// What the endpoint needs of its transport, which it keeps alive.
struct ShmHome {
  std::shared_ptr<Transport> transport;
  RegionServer* server;
  Mappings* mappings;
};

// Once its regions are mapped, the socket only tells whether the owner lives.
class ShmEndpoint final : public RegionEndpoint, public Lender {
 public:
  explicit ShmEndpoint(ShmHome home);
  ~ShmEndpoint() override { close(); }

  Lender* lender() override { return this; }
  std::shared_ptr<Transfer> lend(std::shared_ptr<MemoryRegion> local, std::shared_ptr<RemoteRegion> remote,
                                 std::vector<Span> spans, std::vector<Word> words, Takes takes) override;
  bool maps(const RemoteRegion& remote) override;

  // Null once the endpoint is closed.
  std::shared_ptr<ReadOnlyMapping> mapping(const ShmRemoteRegion& region);

 protected:
  std::string make_half() override;
  bool take_half(std::string_view remote, std::string* error) override;
  std::shared_ptr<AskedRegion> make_region(uint32_t id, uint64_t nbytes) override;
  void keep(std::shared_ptr<OwnerSocket> connection) override { connection_ = std::move(connection); }
  std::shared_ptr<OwnerSocket> connection() override { return connection_; }
  bool take_reply(AskedRegion& region, int connection, bool* is_complete) override;
  std::shared_ptr<Batch> make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) override;
  void shutdown_sockets() override;
  void release() override;

 private:
  const ShmHome home_;
  std::shared_ptr<OwnerSocket> connection_;
};

class ShmBatch final : public RegionBatch {
 public:
  ShmBatch(std::shared_ptr<ShmEndpoint> endpoint, std::shared_ptr<ShmRemoteRegion> remote, Reads reads)
      : RegionBatch(*endpoint, *remote, std::move(reads)),
        endpoint_(std::move(endpoint)),
        remote_(std::move(remote)) {}
  ~ShmBatch() override { settle(Status::kCanceled); }

 protected:
  bool begin() override;
  bool copy_slice(const Deadline* deadline) override;
  bool is_proven(size_t span) const override;
  void quiesce() override { mapping_.reset(); }  // copies have ended; the peer's memory is let go of at once

 private:
  void land_parts();
  void copy_part(const Part& part);

  const std::shared_ptr<ShmEndpoint> endpoint_;
  const std::shared_ptr<ShmRemoteRegion> remote_;
  std::shared_ptr<ReadOnlyMapping> mapping_;  // of the driving thread alone
};

}  // namespace p2pkv::shm
