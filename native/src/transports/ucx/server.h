// The owner's side of the ucx transport: lets readers in and sends them what they ask for.
//
// The owner sends, and vouches for the words: it loads them when UCX has reported every send of the
// request's bytes complete, that is when nothing reads those bytes any more. A reader never touches this
// memory, so no key to it leaves this process.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "net/tokens.h"
#include "transports/registered.h"
#include "transports/ucx/frames.h"
#include "transports/ucx/worker.h"

namespace p2pkv::ucx {

// At most kMaxConnections at a time; one more drops the one that has been idle for longest. UCX itself lets
// anybody connect who reaches its port; what costs memory here, and all data, waits for a live token.
class Server {
 public:
  static constexpr size_t kMaxConnections = 1024;

  static std::unique_ptr<Server> start(std::shared_ptr<Context> context, std::shared_ptr<RegionTable> regions,
                                       std::string* error);
  ~Server() { close(); }
  // Ends every use of UCX here, and lets its context go: that has threads and descriptors of its own.
  void close();

  // Where peers connect to.
  const std::string& address() const { return address_; }
  TokenTable& tokens() { return tokens_; }
  // For readers of the same transport; null once closed.
  std::shared_ptr<Context> context();
  // Hangs up on the connection of one grant.
  void drop_grant(uint64_t grant);
  // Hangs up on every reader that bytes of a region are on their way to. Called while the region closes:
  // those sends may wait for their reader, and closing must not.
  void drop_readers_of(uint32_t region);

 private:
  class Sending;
  class Ending;
  class Refusal;
  using Clock = std::chrono::steady_clock;

  struct Request {
    uint64_t id;                               // the reader's
    uint64_t serial;                           // ours
    std::shared_ptr<RegisteredRegion> region;  // null: gone, or never was
    std::vector<SpanRequest> spans;
    size_t at = 0;          // the span whose bytes are sent next
    uint64_t sent = 0;      // of that span
    uint64_t position = 0;  // in the request's bytes
    size_t n_in_flight = 0;
    bool is_gone = false;
    bool has_bytes_left() const { return !is_gone && at < spans.size(); }
  };
  struct Connection {
    ucp_ep_h endpoint = nullptr;
    uint64_t grant = 0;
    std::deque<std::unique_ptr<Request>> requests;
    uint64_t n_bytes_in_flight = 0;
    Clock::time_point since;  // it came, asked or took something last
  };

  explicit Server(std::shared_ptr<RegionTable> regions) : regions_(std::move(regions)) {}
  std::unique_ptr<Port> make_port(std::shared_ptr<Context> context, std::string* error);
  void lost(ucp_ep_h endpoint);
  void make_room();
  void drop(uint64_t reader);

  void greeted(std::string_view frame, std::string_view address, ucp_ep_h from);
  void asked(std::string_view frame, std::string_view payload);
  bool is_valid(Request& request) const;
  bool serve();
  bool serve(uint64_t reader, Connection& connection);
  bool send_bytes(uint64_t reader, Connection& connection, Request& request);
  void send_end(uint64_t reader, Connection& connection, Request& request);
  void bytes_settled(const Sending& sending, bool is_sent);
  void left(std::string_view frame);
  void drop_stalled();
  void say_goodbye();

  const std::shared_ptr<RegionTable> regions_;
  std::string address_;
  TokenTable tokens_;
  size_t n_refusals_ =
      0;  // of the worker's thread; outlives the worker, whose last messages count themselves out
  std::unique_ptr<Worker> worker_;
  std::mutex mutex_;  // guards context_
  std::shared_ptr<Context> context_;
  // All below: the worker's thread only.
  std::unordered_map<uint64_t, Connection> connections_;  // by the reader's number
  std::unordered_set<uint64_t> busy_;                     // readers that have asked for something
  uint64_t last_serial_ = 0;
  std::vector<uint64_t> doomed_;  // found out within UCX's callbacks, where they can't be closed
};

}  // namespace p2pkv::ucx
