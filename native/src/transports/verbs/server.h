// The owner's side of the verbs transport: queue pairs of readers that the control loop let in, and how it is
// noticed that they are gone.
//
// The device answers reads by itself. A reader that closes says good-bye, a message of nothing. One that was
// killed does not, and its device tells nobody: so every kKeepAlive the owner RDMA READs 8 bytes, the beacon,
// from each reader, which the reader's device answers for as long as the queue pair exists, even while its
// process is stopped. Without an answer the pair is destroyed.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/fd.h"
#include "base/thread.h"
#include "transports/verbs/connector.h"
#include "transports/verbs/memory.h"
#include "transports/verbs/queue_pair.h"

namespace p2pkv::verbs {

// Thread-safe.
class Server {
 public:
  // Null, with the reason in `error`.
  static std::shared_ptr<Server> start(const Rails& rails, std::shared_ptr<Connector> connector,
                                       std::string* error);
  ~Server() { close(); }

  // The answer to a reader's half of a handshake; empty, with the reason in `error`, if it is refused.
  std::string accept(std::string_view remote, std::string* error);
  // Says good-bye to all readers. Idempotent.
  void close();

 private:
  using Clock = std::chrono::steady_clock;
  struct Reader {
    size_t rail;
    std::shared_ptr<QueuePair> pair;
    Outcome outcome;  // of connecting it
    Clock::time_point next_probe;
    bool is_probing = false;
  };
  using Readers = std::unordered_map<uint64_t, Reader>;  // by serial number, never used again

  Server() = default;
  struct Lane {
    LaneBlob blob{};
    Outcome outcome;
  };
  // With a blob of zeros, and the reason in `error`, if it can't be had.
  Lane let_in(size_t rail, const LaneBlob& reader, uint32_t packet, std::string* error);
  void run();
  void look_at(CompletionQueue& completions, std::vector<Readers::node_type>* gone);
  void probe(std::vector<Readers::node_type>* gone);
  void wait_for_good_byes(size_t n);

  Rails rails_;
  std::shared_ptr<Connector> connector_;
  std::vector<std::shared_ptr<CompletionQueue>> completions_;  // by rail
  Wakeup stop_;
  NamedThread thread_;
  std::mutex closing_;  // held by the one close() that does the work
  std::mutex mutex_;    // guards all below
  bool is_closed_ = false;
  uint64_t last_serial_ = 0;
  Readers readers_;
};

}  // namespace p2pkv::verbs
