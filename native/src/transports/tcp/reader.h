// The reader's side of the tcp transport: several streams to one owner, a batch spread over them.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/thread.h"
#include "transports/batch_endpoint.h"
#include "transports/tcp/server.h"
#include "transports/tcp/stream.h"

namespace p2pkv::tcp {

// A thread that drives one stream beside the caller's.
class Helper {
 public:
  ~Helper() { close(); }
  bool start();
  void close();
  // The task before must have ended.
  void give(std::function<void()> task);

 private:
  void run();

  std::mutex mutex_;  // guards all below
  std::condition_variable given_;
  std::function<void()> task_;
  bool is_closing_ = false;
  NamedThread thread_;
};

// What the endpoint needs of its transport, which it keeps alive.
struct TcpHome {
  std::shared_ptr<Transport> transport;
  Server* server;
  uint32_t n_streams;
};

// How `server` presents itself to a reader that makes up to `n_tokens` connections under one grant.
std::string make_blob(Server& server, uint32_t n_streams, uint32_t n_tokens, uint64_t grant);

class TcpEndpoint final : public BatchEndpoint {
 public:
  explicit TcpEndpoint(TcpHome home);
  ~TcpEndpoint() override { close(); }

  std::shared_ptr<RemoteRegion> attach(std::string_view region, std::string* error) override;

 protected:
  std::string make_half() override;
  bool take_half(std::string_view remote, std::string* error) override;
  std::shared_ptr<Batch> make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) override;
  void shutdown_sockets() override;
  void release() override;

 private:
  friend class TcpBatch;

  const TcpHome home_;
  const uint64_t grant_;
  std::vector<Stream> streams_;               // fixed from bind() on; each driven by one thread of the batch
  std::vector<ThreadOwner<Helper>> helpers_;  // for streams_[1] and so on, from the first large batch on
};

class TcpBatch final : public Batch {
 public:
  TcpBatch(std::shared_ptr<TcpEndpoint> endpoint, std::shared_ptr<AttachedRegion> remote, Reads reads);
  ~TcpBatch() override { settle(Status::kCanceled); }

  // Sends the requests and sets the helpers to work.
  void start() override;

 protected:
  bool drive(const Deadline* deadline) override;
  void interrupt() override { endpoint_->sever(); }
  void quiesce() override;

 private:
  void help(Stream& stream);
  bool drive_own_stream(const Deadline* deadline);
  void give_up(Stream::Progress why);

  const std::shared_ptr<TcpEndpoint> endpoint_;
  const std::shared_ptr<AttachedRegion> remote_;
  bool is_own_done_ = false;  // of the driving thread
  std::mutex helpers_mutex_;  // guards n_helping_
  std::condition_variable helpers_done_;
  size_t n_helping_ = 0;
};

}  // namespace p2pkv::tcp
