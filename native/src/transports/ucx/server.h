// The owner's side of the ucx transport: lets readers in and sends them what they ask for.
//
// The owner sends, and vouches for the words: it loads them when UCX has reported every send of the
// request's bytes complete, that is when nothing reads those bytes any more. A reader never touches this
// memory, so no key to it leaves this process.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "../registered.h"
#include "address.h"
#include "frames.h"
#include "p2pkv/tokens.h"
#include "worker.h"

namespace p2pkv::ucx {

// At most kMaxConnections at a time, of which kMaxVisitors have not shown a token yet; one more visitor drops
// the oldest.
class Server {
 public:
  static constexpr size_t kMaxConnections = 1024;
  static constexpr size_t kMaxVisitors = 256;

  static std::unique_ptr<Server> start(const Address& address, const Settings& settings,
                                       std::shared_ptr<RegionTable> regions, std::string* error);
  ~Server() { close(); }
  void close() { worker_->close(); }

  // Where peers connect to.
  const Address& address() const { return address_; }
  TokenTable& tokens() { return tokens_; }
  // Hangs up on the connection of one grant.
  void drop_grant(uint64_t grant);
  // Hangs up on every reader that bytes of a region are on their way to. Called while the region closes:
  // those sends may wait for their reader, and closing must not.
  void drop_readers_of(uint32_t region);

 private:
  class Sending;
  class Ending;
  using Clock = std::chrono::steady_clock;

  struct Request {
    uint64_t id;  // the reader's
    uint64_t serial;  // ours
    std::shared_ptr<RegisteredRegion> region;  // null: gone, or never was
    std::vector<SpanRequest> spans;
    size_t at = 0;         // the span whose bytes are sent next
    uint64_t sent = 0;     // of that span
    uint64_t position = 0;  // in the request's bytes
    size_t n_in_flight = 0;
    bool is_gone = false;
    bool has_bytes_left() const { return !is_gone && at < spans.size(); }
  };
  struct Connection {
    ucp_ep_h endpoint;
    uint64_t reader = 0;  // what it calls itself
    uint64_t grant = 0;
    bool is_admitted = false;
    std::deque<std::unique_ptr<Request>> requests;
    uint64_t n_bytes_in_flight = 0;
    Clock::time_point since;  // it came, or took something last
  };
  // Numbered, because callbacks of UCX outlive connections.
  using Connections = std::unordered_map<uint64_t, Connection>;

  explicit Server(std::shared_ptr<RegionTable> regions) : regions_(std::move(regions)) {}
  bool listen(std::string* error);
  static void knocked(ucp_conn_request_h request, void* server);
  static void failed(void* server, ucp_ep_h endpoint, ucs_status_t status);
  void admit(ucp_conn_request_h request);
  void drop_oldest_visitor();
  void drop(uint64_t number);
  uint64_t number_of(ucp_ep_h endpoint) const;

  void greeted(std::string_view frame, ucp_ep_h from);
  void asked(std::string_view frame, std::string_view payload, ucp_ep_h from);
  bool is_valid(Request& request) const;
  bool serve();
  bool serve(uint64_t number, Connection& connection);
  bool send_bytes(uint64_t number, Connection& connection, Request& request);
  void send_end(Connection& connection, Request& request);
  void bytes_settled(const Sending& sending, bool is_sent);
  void drop_stalled();

  const std::shared_ptr<RegionTable> regions_;
  Address address_;
  TokenTable tokens_;
  std::unique_ptr<Worker> worker_;
  // All below: the worker's thread only.
  ucp_listener_h listener_ = nullptr;
  Connections connections_;
  std::unordered_map<ucp_ep_h, uint64_t> numbers_;
  uint64_t last_number_ = 0;
  uint64_t last_serial_ = 0;
  std::vector<uint64_t> failed_;  // found out within UCX's callbacks, where they can't be closed
};

}  // namespace p2pkv::ucx
