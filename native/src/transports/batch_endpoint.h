// What the endpoints of the built-in transports have in common: a handshake, one batch at a time, and a clean
// end.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transports/batch.h"
#include "transports/registered.h"
#include "transports/transport.h"

namespace p2pkv {

// A peer's region, good for the one endpoint that attached it.
class AttachedRegion : public RemoteRegion {
 public:
  AttachedRegion(const Endpoint* endpoint, uint32_t id, uint64_t nbytes)
      : endpoint(endpoint), id(id), size(nbytes) {}
  uint64_t nbytes() const final { return size; }

  const Endpoint* const endpoint;  // for comparison only
  const uint32_t id;               // by which its owner knows it
  const uint64_t size;
};

class BatchEndpoint : public Endpoint {
 public:
  std::string describe() final;
  bool bind(std::string_view remote, std::string* error) final;
  std::shared_ptr<Transfer> read(std::shared_ptr<MemoryRegion> local, std::shared_ptr<RemoteRegion> remote,
                                 std::vector<Span> spans, std::vector<Word> words) final;
  void close() final;

  // Ends the batch under way if it reads into `region`; returns when nothing writes there any more.
  void cancel_reads_into(const RegisteredRegion& region);
  // Breaks the way to the peer, so that system calls of other threads on it return. The endpoint is done for.
  void sever();

 protected:
  std::shared_ptr<Transfer> post(std::shared_ptr<MemoryRegion> local, std::shared_ptr<RemoteRegion> remote,
                                 Reads reads);

  // All called with mutex_ held; none blocks.
  // This end's half of the handshake; empty if it can't be made. Asked for once, before take_half().
  virtual std::string make_half() = 0;
  // Takes the peer's half, once. False, with the reason in `error`, if it is none.
  virtual bool take_half(std::string_view remote, std::string* error) = 0;
  // A batch, not started. `remote` is what attach() of this endpoint returned.
  virtual std::shared_ptr<Batch> make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) = 0;
  virtual void shutdown_sockets() = 0;
  // Called once, without mutex_, when nothing is in flight any more: closes sockets, ends helpers, revokes
  // the grant.
  virtual void release() = 0;

  const pid_t pid_ = getpid();
  std::mutex mutex_;  // guards the members below and those of subclasses
  bool is_closed_ = false;
  bool is_severed_ = false;
  bool is_bound_ = false;

 private:
  void wait_settled(uint64_t n_posted);

  std::string half_;
  std::weak_ptr<Batch> active_;
  uint64_t n_posted_ = 0;               // batches, so far
  std::atomic<uint64_t> n_settled_{0};  // of those; one at most has not
  bool is_released_ = false;
  std::mutex closing_;  // held by the one close() that does the work, so that the others return after it
};

// The endpoints a transport has opened and not yet forgotten.
class EndpointList {
 public:
  // False once closed.
  bool add(const std::shared_ptr<Endpoint>& endpoint);
  std::vector<std::shared_ptr<Endpoint>> all();
  void close();

 private:
  std::mutex mutex_;  // guards all below
  std::vector<std::weak_ptr<Endpoint>> endpoints_;
  bool is_closed_ = false;
};

}  // namespace p2pkv
