// Reading the memory of the peer at the other end of a link: what the link says of it, over borrowed
// connections.
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
#include "offers/offer_messages.h"
#include "offers/row_memories.h"
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
  bool use(std::shared_ptr<BoundEndpoint> endpoint);

  std::mutex mutex_;  // guards endpoint_
  std::shared_ptr<BoundEndpoint> endpoint_;
  std::atomic<bool> is_broken_{false};
};

// One row to read.
struct PullRow {
  std::shared_ptr<const RowMemory> local;
  uint64_t local_offset;
  RowRecord remote;
  Status status = Status::kPending;
  bool has_failed_copy = false;  // it was read, and did not come to its device
  bool is_unreachable = false;   // it lies on a device that this node's can't read from
};

// Thread-safe. The peer layer says which way leads to the peer, and lends connections; what it has to open is
// opened over the link, so that neither side needs its interpreter.
class PeerReader {
 public:
  // `n_fallbacks` counts how often a memory was not reached over a way that leads to the peer.
  PeerReader(std::shared_ptr<Link> link, const Transfers::Options& options,
             std::atomic<uint64_t>& n_fallbacks);
  ~PeerReader() { close(); }

  // Reads the rows, group by group of those that share both memories. Blocks until each has settled, until
  // the deadline at most; then nothing writes to local memory any more.
  void read(std::vector<PullRow>& rows, const Deadline& deadline, PullJob& job);
  // An answer to a question of this reader's.
  void replied(const wire::Header& header, wire::Reader body);
  // Ends waits for answers: the link is lost, or a job was broken off.
  void wake();
  // Reads nothing any more. Idempotent.
  void close();

 private:
  using Clock = Deadline::Clock;
  using ConnectionPtr = PeerConnections::ConnectionPtr;

  void read_group(std::vector<PullRow*>& rows, const Deadline& deadline, PullJob& job);
  // Returns the worst of the rows, and gives the connection back.
  Status read_over(const ConnectionPtr& connection, const std::shared_ptr<RemoteRegion>& remote,
                   std::vector<PullRow*>& rows, const Deadline& deadline, PullJob& job);
  std::optional<std::vector<WayMessage>> describe(uint32_t source, const Deadline& deadline,
                                                  const PullJob& job);
  void forget_descriptions();
  // What the peer said of this way to its memory; null: it does not lead there.
  const WayMessage* find(const std::vector<WayMessage>& known, const Transfers::Way& way) const;
  // The memory's region with a connection; null if it is none of that transport's any more.
  std::shared_ptr<RemoteRegion> attach(Connection& connection, uint32_t source,
                                       const std::vector<WayMessage>& known) const;
  std::optional<Opened> open(size_t number, const Deadline& deadline, const PullJob& job);
  // The place in `ways_` of the transport that has this number with the peer layer.
  size_t place_of(size_t number) const;
  std::optional<std::string> ask(Kind kind, std::string_view body, const Deadline& deadline,
                                 const PullJob& job);

  const std::shared_ptr<Link> link_;
  const std::vector<Transfers::Way>& ways_;
  const std::shared_ptr<PeerConnections> peers_;
  std::atomic<uint64_t>& n_fallbacks_;
  std::mutex mutex_;  // guards all below
  std::condition_variable answered_;
  std::map<uint32_t, std::vector<WayMessage>> known_;  // sources
  std::map<uint64_t, std::optional<std::string>> answers_;
  uint64_t last_id_ = 0;
  bool is_closed_ = false;
};

}  // namespace p2pkv::offers
