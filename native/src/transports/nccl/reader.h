// The reader's side of the nccl transport: the lines to owners, endpoints that share them, and their batches.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transports/batch_endpoint.h"
#include "transports/nccl/line.h"
#include "transports/nccl/server.h"

namespace p2pkv::nccl {

// The lines of a transport, one to each owner. Thread-safe.
class LineBook {
 public:
  // The line to an owner, attached: the one there is, or a new one through this door. Null, with the reason
  // in `error`.
  std::shared_ptr<Line> attach(Means* means, const EndpointBlob& owner, std::string* error);
  // Ends every line; there are no new ones.
  void close();

 private:
  std::mutex mutex_;  // guards all below
  std::map<Instance, std::shared_ptr<Line>> lines_;
  std::vector<std::shared_ptr<Line>> leaving_;  // that NCCL may still have to let go of
  bool is_closed_ = false;
};

// What an endpoint needs of its transport, which it keeps alive.
struct NcclHome {
  std::shared_ptr<Transport> transport;
  Means* means;
  Server* server;
  LineBook* lines;
  const Instance* instance;
};

class NcclEndpoint final : public BatchEndpoint {
 public:
  explicit NcclEndpoint(NcclHome home) : home_(std::move(home)) {}
  ~NcclEndpoint() override { close(); }

  std::string failure() override { return failure_; }
  std::shared_ptr<RemoteRegion> attach(std::string_view region, std::string* error) override;

 protected:
  std::string make_half() override { return home_.server->make_half(*home_.instance, &failure_); }
  bool take_half(std::string_view remote, std::string* error) override;
  std::shared_ptr<Batch> make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) override;
  void shutdown_sockets() override {}  // the line is others' too; a batch under way is aborted by itself
  void release() override;

 private:
  friend class NcclBatch;

  const NcclHome home_;
  std::string failure_;
  std::shared_ptr<Line> line_;  // from bind() to release()
};

// Whoever drives the batch waits: bytes are received, and brought to where they belong, by the line's thread.
class NcclBatch final : public Batch {
 public:
  NcclBatch(std::shared_ptr<NcclEndpoint> endpoint, uint32_t remote, Reads reads);
  ~NcclBatch() override { settle(Status::kCanceled); }

  void start() override { line_->post(intake_); }

 protected:
  bool drive(const Deadline* deadline) override;
  void interrupt() override;
  void quiesce() override;

 private:
  const std::shared_ptr<NcclEndpoint> endpoint_;
  const std::shared_ptr<Line> line_;
  const std::shared_ptr<Intake> intake_;
};

}  // namespace p2pkv::nccl
