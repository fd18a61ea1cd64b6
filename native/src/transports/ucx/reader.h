// The reader's side of the ucx transport: an endpoint, and a batch that asks the owner for its bytes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../leased_endpoint.h"
#include "link.h"
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
  Links* links;
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
  std::shared_ptr<Batch> start_batch(std::shared_ptr<RegisteredRegion> local,
                                     std::shared_ptr<RemoteRegion> remote, std::vector<Span> spans,
                                     std::vector<Word> words, std::vector<Status> statuses) override;
  bool is_bound() const override;
  void shutdown_sockets() override;
  void release() override;

 private:
  friend class UcxBatch;

  const UcxHome home_;
  const uint64_t grant_;
  const std::shared_ptr<Link> link_;
  std::string blob_;
  bool has_peer_ = false;
};

// The worker's thread copies what arrives to local memory, under the link's mutex, so that a batch that has
// let go of the link is written to no more.
class UcxBatch final : public Batch, private Arrivals {
 public:
  UcxBatch(std::shared_ptr<UcxEndpoint> endpoint, std::shared_ptr<RegisteredRegion> local,
           uint32_t remote_region, std::vector<Span> spans, std::vector<Word> words,
           std::vector<Status> statuses);
  ~UcxBatch() override;

  void start();

 protected:
  bool drive(const Deadline* deadline) override;
  void interrupt() override;
  void quiesce() override { let_go(); }

 private:
  // Neighbouring spans that are asked for together.
  struct Request {
    size_t first;  // in order_
    size_t end;
    uint64_t start;  // in starts_
    uint64_t nbytes;
    uint64_t n_arrived = 0;
    bool is_settled = false;
  };

  bool take_bytes(const BytesFrame& frame, std::string_view bytes) override;
  bool take_end(const EndFrame& frame, std::string_view words) override;
  bool next_ask(Ask* ask) override;
  bool is_complete() const override { return n_settled_ == requests_.size(); }

  void plan();
  void scatter(uint64_t position, std::string_view bytes);
  void let_go();

  const std::shared_ptr<UcxEndpoint> endpoint_;
  const uint32_t remote_region_;
  std::vector<uint32_t> order_;   // the spans to read
  std::vector<uint64_t> starts_;  // where each lies in the bytes of all, one after another
  // The link's mutex guards all below once the batch has started.
  std::vector<Request> requests_;
  size_t n_asked_ = 0;
  size_t n_settled_ = 0;
  bool is_local_closed_ = false;
};

}  // namespace p2pkv::ucx
