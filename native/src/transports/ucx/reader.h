// The reader's side of the ucx transport: an endpoint, and a batch that asks the owner for its bytes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/thread.h"
#include "transports/batch_endpoint.h"
#include "transports/ucx/line.h"
#include "transports/ucx/line_ender.h"
#include "transports/ucx/server.h"

namespace p2pkv::ucx {

// What the endpoint needs of its transport, which it keeps alive.
struct UcxHome {
  std::shared_ptr<Transport> transport;
  Server* server;
  LineEnder* ender;
};

// How `server` presents itself to a reader under one grant.
std::string make_blob(Server& server, uint64_t grant);

class UcxEndpoint final : public BatchEndpoint {
 public:
  explicit UcxEndpoint(UcxHome home);
  ~UcxEndpoint() override { close(); }

  std::shared_ptr<RemoteRegion> attach(std::string_view region, std::string* error) override;

 protected:
  std::string make_half() override;
  bool take_half(std::string_view remote, std::string* error) override;
  std::shared_ptr<Batch> make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) override;
  void shutdown_sockets() override;
  void release() override;

 private:
  friend class UcxBatch;

  const UcxHome home_;
  const uint64_t grant_;
  ThreadOwner<Line> line_;  // from bind() to release(); driven by one batch at a time
};

// Whoever drives the batch drives the line, and copies what arrives to local memory: when nobody does,
// nothing is written there.
class UcxBatch final : public Batch, private Arrivals {
 public:
  UcxBatch(std::shared_ptr<UcxEndpoint> endpoint, std::shared_ptr<AttachedRegion> remote, Reads reads);
  ~UcxBatch() override { settle(Status::kCanceled); }

  void start() override;

 protected:
  bool drive(const Deadline* deadline) override;
  void interrupt() override { endpoint_->sever(); }
  void quiesce() override {}

 private:
  // Neighbouring spans that are asked for together.
  struct Request {
    size_t first;  // in order_
    size_t end;
    uint64_t start;  // of its bytes, among those of all
    uint64_t nbytes;
    uint64_t n_arrived = 0;
    bool is_settled = false;
  };

  bool take_bytes(const BytesFrame& frame, std::string_view bytes) override;
  bool take_end(const EndFrame& frame, std::string_view words) override;
  bool is_complete() const { return n_settled_ == requests_.size(); }

  void plan();
  void ask();
  Ask make_ask(size_t number) const;
  void scatter(uint64_t position, std::string_view bytes);
  bool settle_request(Request& request, bool is_gone, std::string_view words);

  const std::shared_ptr<UcxEndpoint> endpoint_;
  const std::shared_ptr<AttachedRegion> remote_;
  std::vector<uint32_t> order_;   // the spans to read
  std::vector<uint64_t> starts_;  // where each lies in the bytes of all, one after another
  std::vector<Request> requests_;
  size_t n_asked_ = 0;
  size_t n_settled_ = 0;
  bool is_local_closed_ = false;
};

}  // namespace p2pkv::ucx
