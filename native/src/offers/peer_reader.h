// Reading one peer's memory: over what it can be reached, and connections lent to one pull at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "offers/link.h"
#include "offers/memories.h"
#include "offers/offer_messages.h"
#include "offers/transfers.h"

namespace p2pkv::offers {

// A pull that somebody may have to break off. Held by the thread that pulls.
class PullJob {
 public:
  // Ends the read under way, and every later one. Returns when that read writes nothing any more.
  void break_off();
  bool is_broken() const { return is_broken_; }

 private:
  friend class PeerReader;
  // False if the job is broken; else `endpoint` is closed when it is.
  bool use(std::shared_ptr<Endpoint> endpoint);

  std::mutex mutex_;  // guards endpoint_
  std::shared_ptr<Endpoint> endpoint_;
  std::atomic<bool> is_broken_{false};
};

// One row to read.
struct PullRow {
  std::shared_ptr<const Memory> local;
  uint64_t local_offset;
  RowRecord remote;
  Status status = Status::kPending;
  bool has_failed_copy = false;  // it was read, and did not come to its device
};

// Thread-safe. The handshakes go over the link, so that neither side needs its interpreter.
class PeerReader {
 public:
  // `n_fallbacks` counts how often a way did not lead to the peer and the next was taken.
  PeerReader(std::shared_ptr<Link> link, const std::vector<Transfers::Way>& ways,
             std::atomic<uint64_t>& n_fallbacks)
      : link_(std::move(link)), ways_(ways), n_fallbacks_(n_fallbacks), states_(ways.size()) {}
  ~PeerReader() { close(); }

  // Reads the rows, group by group of those that share both memories. Blocks until each has settled, until
  // the deadline at most; then nothing writes to local memory any more.
  void read(std::vector<PullRow>& rows, const Deadline& deadline, PullJob& job);
  // An answer to a question of this reader's.
  void replied(const wire::Header& header, wire::Reader body);
  // Ends waits for answers: the link is lost, or a job was broken off.
  void wake();
  void close();

 private:
  using Clock = Deadline::Clock;
  // An endpoint, lent to one pull.
  struct Connection {
    size_t way;
    std::shared_ptr<Endpoint> endpoint;
    std::map<uint32_t, std::shared_ptr<RemoteRegion>> regions;
    bool has_read = false;
  };
  struct WayState {
    std::vector<std::unique_ptr<Connection>> idle;
    Clock::time_point unusable_until{};
  };

  void read_group(std::vector<PullRow*>& rows, const Deadline& deadline, PullJob& job);
  // Returns the worst of the rows.
  Status read_over(Connection& connection, const std::string& region, std::vector<PullRow*>& rows,
                   const Deadline& deadline, PullJob& job);
  std::optional<std::vector<WayMessage>> describe(uint32_t source, const Deadline& deadline,
                                                  const PullJob& job);
  std::unique_ptr<Connection> borrow(const std::vector<WayMessage>& known, const Deadline& deadline,
                                     const PullJob& job, std::string* region);
  std::unique_ptr<Connection> open(size_t way, const Deadline& deadline, const PullJob& job);
  void give_back(std::unique_ptr<Connection> connection, Status worst);
  std::optional<std::string> ask(Kind kind, std::string_view body, const Deadline& deadline,
                                 const PullJob& job);

  const std::shared_ptr<Link> link_;
  const std::vector<Transfers::Way>& ways_;
  std::atomic<uint64_t>& n_fallbacks_;
  std::mutex mutex_;  // guards all below
  std::condition_variable answered_;
  std::vector<WayState> states_;
  std::map<uint32_t, std::vector<WayMessage>> known_;  // sources
  std::map<uint64_t, std::optional<std::string>> answers_;
  uint64_t last_id_ = 0;
  bool is_closed_ = false;
};

}  // namespace p2pkv::offers
