// The engine's side of attaching: one life of its host's node, as one engine sees it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "attach/engine_line.h"
#include "attach/frames.h"
#include "base/call_limit.h"
#include "base/clock.h"
#include "base/fd.h"
#include "base/thread.h"
#include "page/location.h"
#include "page/region.h"
#include "page/vigil.h"
#include "pool/mapped_pool.h"
#include "pool/pool.h"

namespace p2pkv::attaching {

// A node that engines attach to, as it is seen without attaching to it.
struct Seen {
  std::string address;
  std::string cluster;
  uint64_t n_places;  // so many engines it would let in
};

// Asks who listens at `path`. Nothing, with the reason in `error`: nobody whom an engine could attach to.
std::optional<Seen> visit(const std::string& path, const Deadline& deadline, std::string* error);

// Thread-safe. Calls block until their deadline at most.
class Attachment {
 public:
  static constexpr size_t kMostLines = attaching::kMostLines;
  // A staging has at least so many bytes, so that large batches take few rounds.
  static constexpr uint64_t kStagingBytes = 16 << 20;

  // It says what became of the pages of a publish, or of a look-up, with one entry a page.
  struct Answer {
    explicit Answer(size_t n)
        : statuses(n, PoolStatus::kNotTried), is_found(n), is_told(n), sequences(n), locations(n) {}

    std::vector<PoolStatus> statuses;
    std::vector<uint8_t> is_found;    // can be read now
    std::vector<uint8_t> is_told;     // the node's own shard knows, and that is one of those that should
    std::vector<uint64_t> sequences;  // what the directory is to be told under
    std::vector<Location> locations;
    bool is_draining = false;
    bool is_lost = false;  // the node has gone, or was never there to be asked
  };

  // Attaches to the node that listens at `path`. `known`: the pool's region as an earlier life of the node
  // showed it, if there was one. `mark`: by it the node knows the engine when it comes again; 0: it does not.
  // Null, with the reason in `error`.
  static std::shared_ptr<Attachment> open(const std::string& path, std::shared_ptr<MappedRegion> known,
                                          const Deadline& deadline, std::string* error, uint64_t mark = 0);
  ~Attachment() { close(); }

  uint64_t node_key() const { return welcome_.node_key; }
  std::string address() const { return std::string(welcome_.address); }
  // The name of the node's cluster.
  std::string cluster() const { return std::string(welcome_.cluster); }
  // Hands over the node's pool, which may outlive both; once.
  std::shared_ptr<MappedPool> take_pool() { return std::move(pool_); }
  // Another number after each change of any namespace's epoch that the node has heard of.
  uint64_t epochs_version() const { return load_word_of(shown().epochs_version); }
  // Whether the node has heard of every bump that is over by now: it is awake, or was a moment ago. What
  // `epochs_version` says after it counts. False too where the two have clocks of their own.
  bool is_believed() const { return p2pkv::is_believed(shown().believed_until); }

  // Has the node map memory whose memfd is `fd`. Returns its number; 0 if it can't, with the reason in one
  // sentence in `why`. Nothing is published from it before `use` has said where it lies.
  uint32_t share(uint64_t nbytes, int fd, const Deadline& deadline, std::string* why);
  // From now on pages at this address are read in that memory. Doesn't wait.
  void use(uint32_t number, uint64_t address, uint64_t nbytes);
  // Has the node forget it, and publishes from it no more. Doesn't wait: a node that does not hear it now is
  // told by who waits until it has gone.
  void forget(uint32_t number);

  // Says that a publish will follow at once: the node's thread wakes while the caller gets it ready.
  void call_ahead();
  Answer publish(const PageBatch& batch, const Deadline& deadline);
  Answer look_up(const Key* keys, size_t n, const Deadline& deadline) {
    return ask_alone(RequestKind::kLookUp, keys, n, deadline);
  }
  // Publishes those of these pages that lie in the node's pool, without their bytes; the others are
  // kNotTried.
  Answer publish_again(const Key* keys, size_t n, const Deadline& deadline) {
    return ask_alone(RequestKind::kPublishAgain, keys, n, deadline);
  }
  // The same of pages that the caller has published already, to find out what of them is there in the end.
  Answer confirm(const Key* keys, size_t n, const Deadline& deadline) {
    return ask_alone(RequestKind::kConfirm, keys, n, deadline);
  }
  // Says that some owner of these pages' entries has not taken them: the node sees to it.
  void tell_missed(const Key* keys, size_t n, const Deadline& deadline) {
    ask_alone(RequestKind::kMissed, keys, n, deadline);
  }

  // Whether the node wants to hear what the engine's calls find often.
  bool takes_finds() const { return load_word_of(shown().takes_finds) != 0; }
  // Says how often the engine's calls find these pages, kMaxPages at most; each is named once.
  void tell_finds(const Key* keys, const Finds* finds, size_t n, const Deadline& deadline);

  // Waits until the node has gone, or this is closed; false at the deadline.
  bool wait_gone(const Deadline& deadline);
  bool has_gone() { return wait_gone(Deadline::after(0)); }
  // Ends calls under way. Idempotent.
  void close();

 private:
  // Memory that the node reads where it is.
  struct Shared {
    int64_t address;
    int64_t nbytes;
    uint32_t number;
  };
  using SharedList = std::vector<Shared>;
  class BorrowedLine;

  Attachment(std::string path, UniqueFd connection)
      : path_(std::move(path)), connection_(std::move(connection)) {}

  const HostArea& shown() const { return *reinterpret_cast<const HostArea*>(area_->base()); }
  bool hear_of_pool(std::shared_ptr<MappedRegion> known, const Deadline& deadline, std::string* error);
  // How many requests may be under way: as many as both sides agree to.
  size_t most_lines() const;
  // Waits for one of as many as there may be; null at the deadline, or where the node has gone.
  std::unique_ptr<EngineLine> borrow(const Deadline& deadline);
  void give_back(std::unique_ptr<EngineLine> line, bool is_usable);
  std::string tell(const MemoryRequest& request, int fd, const Deadline& deadline);
  // Has the node forget what it is to; false if it takes no more of that now.
  bool send_forgets();
  std::shared_ptr<const SharedList> shared();
  bool place(const PageBatch& batch, std::vector<MemoryPiece>* places);
  bool stage(EngineLine& line, const PageBatch& batch, size_t first, size_t n, const Deadline& deadline);
  bool make_staging(EngineLine& line, uint64_t nbytes, const Deadline& deadline);
  size_t drop_gone(const PageBatch& batch, Answer* answer) const;
  static size_t round_of(const PageBatch& batch, size_t first, bool is_staged);
  bool ask_round(EngineLine& line, RequestKind kind, const PageBatch& batch, size_t first, size_t n,
                 const Deadline& deadline, Answer* answer, bool* is_usable);
  // For a whole call that has keys alone, on a line of its own.
  Answer ask_alone(RequestKind kind, const Key* keys, size_t n, const Deadline& deadline);
  // Requests that have keys alone, whichever they are.
  bool ask_of_keys(EngineLine& line, RequestKind kind, const Key* keys, size_t n, const Deadline& deadline,
                   Answer* answer, bool* is_usable);

  const pid_t pid_ = getpid();
  const std::string path_;
  const UniqueFd connection_;
  Welcome welcome_{};
  std::shared_ptr<ReadOnlyMapping> area_;  // the pool may outlive this, and looks there what it may find
  std::shared_ptr<MappedPool> pool_;       // until it is handed over
  std::weak_ptr<MappedPool> shown_pool_;   // whoever has it then lets go of it when the node has gone
  Wakeup wake_;
  std::atomic<bool> is_closing_{false};

  CallLimit telling_{1};      // who tells of memory: one answer is waited for at a time
  uint32_t next_number_ = 1;  // guarded by it

  std::mutex mutex_;  // guards what follows
  std::condition_variable given_back_;
  std::shared_ptr<const SharedList> shared_ = std::make_shared<SharedList>();
  std::deque<uint32_t> to_forget_;  // numbers of memories that the node was not told to forget yet
  std::vector<std::unique_ptr<EngineLine>> idle_;
  std::vector<EngineLine*> borrowed_;
  size_t n_opening_ = 0;
};

}  // namespace p2pkv::attaching
