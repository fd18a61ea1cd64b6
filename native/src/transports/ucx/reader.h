// The reader's side of the ucx transport: an endpoint, and a batch that asks the owner for its bytes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../leased_endpoint.h"
#include "line.h"
#include "p2pkv/thread.h"
#include "server.h"

namespace p2pkv::ucx {

class UcxEndpoint;

class UcxRemoteRegion final : public RemoteRegion {
 public:
  UcxRemoteRegion(const UcxEndpoint* endpoint, uint32_t id, uint64_t nbytes)
      : endpoint(endpoint), id(id), size(nbytes) {}
  uint64_t nbytes() const override { return size; }

  const UcxEndpoint* const endpoint;  // for comparison only
  const uint32_t id;
  const uint64_t size;
};

// What the endpoint needs of its transport, which it keeps alive.
struct UcxHome {
  std::shared_ptr<Transport> transport;
  Server* server;
  std::shared_ptr<Context> context;
};

// How `server` presents itself to a reader under one grant.
std::string make_blob(Server& server, uint64_t grant);

class UcxEndpoint final : public LeasedEndpoint {
 public:
  explicit UcxEndpoint(UcxHome home);
  ~UcxEndpoint() override { close(); }

  std::string describe() override;
  bool bind(std::string_view remote, std::string* error) override;
  std::shared_ptr<RemoteRegion> attach(std::string_view region, std::string* error) override;

 protected:
  std::shared_ptr<Batch> make_batch(std::shared_ptr<RegisteredRegion> local,
                                    std::shared_ptr<RemoteRegion> remote, std::vector<Span> spans,
                                    std::vector<Word> words, std::vector<Status> statuses) override;
  bool is_bound() const override { return line_ != nullptr; }
  void shutdown_sockets() override;
  void release() override;

 private:
  friend class UcxBatch;

  const UcxHome home_;
  const uint64_t grant_;
  std::string blob_;
  ThreadOwner<Line> line_;  // from bind() to release(); driven by one batch at a time
};

// Whoever drives the batch drives the line, and copies what arrives to local memory: when nobody does,
// nothing is written there.
class UcxBatch final : public Batch, private Arrivals {
 public:
  UcxBatch(std::shared_ptr<UcxEndpoint> endpoint, std::shared_ptr<RegisteredRegion> local,
           uint32_t remote_region, std::vector<Span> spans, std::vector<Word> words,
           std::vector<Status> statuses);
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
  const uint32_t remote_region_;
  std::vector<uint32_t> order_;   // the spans to read
  std::vector<uint64_t> starts_;  // where each lies in the bytes of all, one after another
  std::vector<Request> requests_;
  size_t n_asked_ = 0;
  size_t n_settled_ = 0;
  bool is_local_closed_ = false;
};

}  // namespace p2pkv::ucx
