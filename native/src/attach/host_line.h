// The node's end of a line: a thread that stores what an engine publishes, one request at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "attach/engine_finds.h"
#include "attach/engine_memory.h"
#include "attach/frames.h"
#include "attach/turns.h"
#include "attach/untold.h"
#include "attach/waiting.h"
#include "base/fd.h"
#include "base/thread.h"
#include "directory/ask_batch.h"
#include "directory/shard.h"
#include "disk/tier.h"
#include "page/region.h"
#include "pool/guests.h"
#include "pool/pool.h"

namespace p2pkv::attaching {

// The node stores in these. All but `tier` are there and outlive every line.
struct HostParts {
  Pool& pool;
  Guests& guests;
  Shard& shard;
  Sequences& sequences;
  Tier* tier;  // null: this node has no disk
};

// The lines of one engine have this in common. The memories and turns are its own.
struct EngineParts {
  std::shared_ptr<EngineMemories> memories;
  std::shared_ptr<Turns> turns;
  PoolShare share{};
  uint64_t number = 0;
  EngineFinds* finds = nullptr;  // null: the node brings nothing for engines
};

// What lines have done; they only grow.
struct LineCounts {
  std::atomic<uint64_t> n_requests{0};
  std::atomic<uint64_t> n_withdrawn{0};  // by engines whose time was over
  std::atomic<uint64_t> n_stored_pages{0};
  std::atomic<uint64_t> n_stored_bytes{0};
  std::atomic<uint64_t> n_refused{0};  // requests that no engine of this version writes; they end its line
};

class HostLine final {
 public:
  // Takes the connection, or is null, with the reason in `refusal`. `request` is the memfd of the engine's
  // RequestArea.
  static std::unique_ptr<HostLine> open(UniqueFd* connection, int request, EngineParts engine,
                                        const HostParts& parts, LineCounts& counts, Refusal* refusal);
  ~HostLine() { close(); }

  // Begins to answer; `ended` is called by the thread when there is nobody to answer any more.
  bool start(const std::atomic<bool>& is_draining, std::function<void()> ended);
  // Ends the request under way, if it is not being committed, and waits for the thread.
  void close();

  int answer_fd() const { return answer_region_->fd(); }
  int connection() const { return connection_.get(); }
  bool has_ended() const { return has_ended_; }
  // Whether its engine has closed it, though what it asked for last may still be under way.
  bool is_left() const;

 private:
  class Consented;
  // A request as it was when it was looked at: the engine may write to its area at any time.
  struct Request {
    RequestKind kind;
    size_t n_pages;
    size_t n_pieces;
    Deadline deadline;
    std::vector<Key> keys;
    std::vector<Finds> finds;
    std::vector<Piece> pieces;                            // addresses in this process
    std::vector<std::shared_ptr<MappedMemory>> memories;  // that they lie in
  };

  HostLine(EngineParts engine, const HostParts& parts, LineCounts& counts)
      : engine_(std::move(engine)), parts_(parts), counts_(counts) {}

  void run();
  bool answer(uint64_t id);
  bool take(uint64_t id, Request* request) const;
  bool take_pieces(Request* request) const;
  void serve(uint64_t id, const Request& request);
  void give_up(const Request& request);
  void publish(uint64_t id, const Request& request);
  void publish_again(uint64_t id, const Request& request);
  void look_up(const Request& request);
  bool announce(const Request& request);
  void note_published(const std::vector<Key>& keys);
  void tell(const std::vector<Key>& untold);
  // The request that was answered last, or is looked at, is not the last one that was written.
  bool is_asked() const { return is_closing_ || load_word_of(request_->id) != last_id_; }
  bool wake_engine() const { return wake(connection_.get(), request_->is_awake, last_id_); }
  bool is_withdrawn(uint64_t id) const { return is_closing_ || load_word_of(request_->withdrawn) >= id; }

  UniqueFd connection_;  // stays the same from `open` on
  const EngineParts engine_;
  const HostParts parts_;
  LineCounts& counts_;
  std::unique_ptr<ReadOnlyMapping> request_mapping_;
  std::unique_ptr<SharedRegion> answer_region_;
  const RequestArea* request_ = nullptr;
  AnswerArea* answer_ = nullptr;
  const std::atomic<bool>* is_draining_ = nullptr;
  std::atomic<bool> is_closing_{false};
  std::atomic<bool> has_ended_{false};
  uint64_t last_id_ = 0;  // of the thread alone
  Untold untold_;         // of the thread alone
  NamedThread thread_;
};

}  // namespace p2pkv::attaching
