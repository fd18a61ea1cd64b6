// The node's side of attaching: it lets engines of its host in, and keeps what they share.
//
// A thread lets them in and hears which memory they share; each line has a thread of its own, so that a large
// publish of one holds up no other. None of them needs the interpreter.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "attach/disposer.h"
#include "attach/engine_finds.h"
#include "attach/engine_memory.h"
#include "attach/engine_shares.h"
#include "attach/frames.h"
#include "attach/host_line.h"
#include "base/fd.h"
#include "base/thread.h"
#include "page/namespace_epochs.h"
#include "page/region.h"

namespace p2pkv::attaching {

class Host {
 public:
  static constexpr size_t kMostEngines = attaching::kMostEngines;
  static constexpr size_t kMostLines = attaching::kMostLines;  // and as many again that an engine has closed
  static_assert(kMostEngines <= Pool::kMostAccounts);
  static constexpr size_t kMostVisitors = 16;  // who have not said yet what they want; the oldest has to go

  struct Stats {
    uint64_t engines;
    uint64_t lines;
    uint64_t memory_bytes;  // that engines share
    uint64_t n_refused;     // connections of strangers, of other versions, beyond a limit, or with nonsense
    uint64_t n_requests;
    uint64_t n_withdrawn;
    uint64_t n_stored_pages;
    uint64_t n_stored_bytes;
    uint64_t largest_charge;  // bytes of the pool that are charged to one engine
    uint64_t n_taken_out;     // pages, for being above their engine's share
    uint64_t n_not_taken;     // pages that had no room in their engine's share
  };

  // Each engine has these.
  struct Limits {
    uint64_t pool_nbytes = 0;            // that its pages may have; 0: all of the pool
    size_t requests = Host::kMostLines;  // under way at once; kMostLines at most
    bool takes_finds = false;            // whether the node hears what they find often
  };

  // Engines are told this of the node.
  struct Identity {
    uint64_t node_key;
    std::string address;
    std::string cluster;
  };

  // `listener`: a Unix socket of whole packets that listens. All of `parts` and `epochs` outlive this; the
  // pool is one that is shown. Null, with the reason in `error`.
  static std::shared_ptr<Host> start(UniqueFd listener, const HostParts& parts, NamespaceEpochs& epochs,
                                     const Identity& identity, const Limits& limits, std::string* error);
  ~Host() { close(); }

  // Stores nothing any more that is published.
  void drain() { is_draining_ = true; }
  // Lets in who comes to another listening socket from then on, and nobody at the one of before.
  void listen_at(UniqueFd listener);
  // Ends every line, when what it commits is committed, and lets nobody in any more. Idempotent.
  void close();
  Stats stats();
  // What engines have said lately of what they find, as `EngineFinds::list`.
  std::vector<EngineFinds::OfEngine> finds(double least_rate, size_t most) {
    return finds_.list(least_rate, most);
  }

 private:
  // A line that is let in when one has ended that its engine has closed. `area`: the memfd that it brought.
  struct AwaitedLine {
    UniqueFd connection;
    UniqueFd area;
  };

  struct Engine {
    UniqueFd connection;
    uint64_t number;
    uint64_t secret;
    EngineParts parts;
    std::list<std::unique_ptr<HostLine>> lines;
    std::list<AwaitedLine> awaited;  // of the thread alone
  };

  Host(UniqueFd listener, const HostParts& parts, NamespaceEpochs& epochs, const Identity& identity,
       const Limits& limits);

  void run();
  bool let_in();  // false where it can't for now, since no descriptor is left
  // These return false when the connection is to be closed.
  bool greet(UniqueFd* connection);
  bool admit_engine(UniqueFd* connection, uint64_t mark);
  bool show_pool(int connection) const;
  bool admit_line(UniqueFd* connection, const Hello& hello, UniqueFd area);
  bool open_line(Engine& engine, UniqueFd* connection, int area);
  void open_awaited(Engine& engine);
  bool hear(Engine& engine);
  void refuse(int connection, Refusal why);
  Welcome welcome(const Engine& engine) const;
  void reap();

  UniqueFd listener_;  // of the thread alone, while it runs
  const HostParts parts_;
  NamespaceEpochs& epochs_;
  const Identity identity_;
  const Limits limits_;
  std::unique_ptr<EngineShares> shares_;  // null where engines may have all of the pool; outlives every line
  std::unique_ptr<SharedRegion> area_;
  std::atomic<bool> is_draining_{false};
  std::atomic<uint64_t> n_refused_{0};
  LineCounts counts_;
  EngineFinds finds_;  // outlives every line
  Wakeup wake_;
  std::atomic<bool> is_closing_{false};

  const pid_t pid_ = getpid();
  std::vector<UniqueFd> visitors_;  // of the thread alone
  uint64_t next_number_ = 1;        // as is this

  std::mutex mutex_;  // guards what follows
  std::list<std::shared_ptr<Engine>> engines_;
  UniqueFd next_listener_;  // none, unless the thread has yet to take it
  Disposer disposer_;
  NamedThread thread_;
};

}  // namespace p2pkv::attaching
