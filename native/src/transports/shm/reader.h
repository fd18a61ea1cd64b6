// The reader's side of the shm transport: connects to an owner, maps its regions and copies out of them.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "transports/batch_endpoint.h"
#include "transports/shm/frames.h"
#include "transports/shm/mappings.h"
#include "transports/shm/server.h"

namespace p2pkv::shm {

// A peer's region. Its mapping arrives with the owner's reply; all but the sizes is guarded by the endpoint's
// mutex.
class ShmRemoteRegion final : public AttachedRegion {
 public:
  using AttachedRegion::AttachedRegion;

  std::shared_ptr<ReadOnlyMapping> mapping;
  bool is_refused = false;
};

// What the endpoint needs of its transport, which it keeps alive.
struct ShmHome {
  std::shared_ptr<Transport> transport;
  RegionServer* server;
  Mappings* mappings;
};

// The connection is made and the regions are asked for without blocking, in bind() and attach(); the replies
// are taken when the first read needs them. After that the socket only tells whether the owner lives.
class ShmEndpoint final : public BatchEndpoint, public Lender {
 public:
  explicit ShmEndpoint(ShmHome home);
  ~ShmEndpoint() override { close(); }

  std::shared_ptr<RemoteRegion> attach(std::string_view region, std::string* error) override;
  Lender* lender() override { return this; }
  std::shared_ptr<Transfer> lend(std::shared_ptr<MemoryRegion> local, std::shared_ptr<RemoteRegion> remote,
                                 std::vector<Span> spans, std::vector<Word> words, Takes takes) override;

  enum class Progress { kReady, kWaiting, kRefused, kLost };
  // Connects, asks and takes replies as far as possible without blocking; the mapping, if it is there by now.
  Progress poll_mapping(ShmRemoteRegion& region, std::shared_ptr<ReadOnlyMapping>* mapping);
  // Blocks until something may have changed. Only for the thread that drives the batch.
  void wait_for_owner(const Deadline& deadline);
  bool is_owner_alive();

 protected:
  std::string make_half() override;
  bool take_half(std::string_view remote, std::string* error) override;
  std::shared_ptr<Batch> make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) override;
  void shutdown_sockets() override;
  void release() override;

 private:
  // With mutex_ held; false once the owner is lost.
  bool advance();
  bool take_replies();

  const ShmHome home_;
  const uint64_t grant_;
  bool is_greeted_ = false;
  EndpointBlob owner_{};
  std::string owner_name_;
  UniqueFd connection_;
  std::vector<std::weak_ptr<ShmRemoteRegion>> regions_;     // all ever attached
  std::deque<std::shared_ptr<ShmRemoteRegion>> to_ask_;     // not asked for yet
  std::deque<std::shared_ptr<ShmRemoteRegion>> to_answer_;  // asked for, in order
};

class ShmBatch final : public Batch {
 public:
  ShmBatch(std::shared_ptr<ShmEndpoint> endpoint, std::shared_ptr<ShmRemoteRegion> remote, Reads reads);
  ~ShmBatch() override { settle(Status::kCanceled); }

 protected:
  bool drive(const Deadline* deadline) override;
  void interrupt() override { endpoint_->sever(); }
  void quiesce() override { mapping_.reset(); }  // copies have ended; the peer's memory is let go of at once

 private:
  // Some bytes of a span, copied in one go; all of one that is taken.
  struct Part {
    size_t span;
    uint64_t offset;
    uint64_t nbytes;
  };

  bool await_mapping(const Deadline* deadline);
  bool copy_slice(uint64_t nbytes, const Deadline* deadline);
  uint64_t cut_parts(uint64_t nbytes);
  void copy_part(const Part& part);
  void settle_parts(size_t n);

  const std::shared_ptr<ShmEndpoint> endpoint_;
  const std::shared_ptr<ShmRemoteRegion> remote_;
  // Of the driving thread alone.
  std::shared_ptr<ReadOnlyMapping> mapping_;
  size_t next_ = 0;          // the span to go on with
  uint64_t n_copied_ = 0;    // bytes of it
  std::vector<Part> parts_;  // of the slice under way; helpers of the copies read it
};

}  // namespace p2pkv::shm
