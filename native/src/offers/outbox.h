// The producer's side: what this node offers, who asks for it, and whether an offer is still valid.
//
// This is where the proof of a pull is made. A receiver tells when it has the last byte; only then, and under
// the same lock as every withdrawal, it is decided whether the offer was valid all the time. An offer's id
// never names another one, and an ended one never comes back.
//
// More rows than one message has are offered in parts, which are told, pulled and proven one by one.
//
// Rows of devices are offered in parts as well, each of which is copied to staging by a thread of its own
// before anybody is told of it: at once if it is put, and when somebody asks for it otherwise. What nobody
// asks for any more gives its place to others; and is staged again, under another id, when somebody does. A
// receiver that reads devices' memory itself is told where the rows lie, as soon as their stream is done, and
// nothing is staged for it.
//
// Rows that nobody takes for long may be stowed: they are copied to the buddy pool, and offered from there
// under another id.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/thread.h"
#include "offers/gone_rows.h"
#include "offers/link.h"
#include "offers/offer_messages.h"
#include "offers/receive_buffers.h"
#include "offers/row_memories.h"
#include "offers/shares.h"
#include "offers/staging_area.h"
#include "offers/transfers.h"

namespace p2pkv::offers {

class Outbox : public std::enable_shared_from_this<Outbox> {
 public:
  // `remember_s`: how long who asks for rows whose offer is over is told so. `ways`: those of the node, as
  // `way_text` says them; empty those that do not read devices' memory.
  Outbox(double remember_s, std::vector<std::string> ways);

  ~Outbox() { stager_.join(); }
  // Rows of devices go through this from now on; called once. False: there is no thread to be had.
  bool start_staging(std::shared_ptr<StagingArea> staging);
  // Rows that are stowed go to it; called once, before there are any.
  void start_stowing(std::shared_ptr<Arena> pool) { pool_ = std::move(pool); }

  // `to` and `link`: who is told, or 0 and null: whoever asks. Null, with the reason in `error`, if a row is
  // offered already.
  std::shared_ptr<Offer> offer(uint64_t to, const std::shared_ptr<Link>& link, Rows rows, PlacedRows placed,
                               const Deadline& lease, std::string* error);
  // Ends the offers that lie in this memory.
  void withdraw_memory(uint32_t memory_id);

  // What came over links; false for what no node of ours would send.
  bool asked(const std::shared_ptr<Link>& link, wire::Reader body);
  bool ask_ended(const std::shared_ptr<Link>& link, wire::Reader body);
  bool pulled(const std::shared_ptr<Link>& link, uint32_t count, wire::Reader body);
  bool asked_to_stage(const std::shared_ptr<Link>& link, uint32_t count, wire::Reader body);

  void lost(const Link& link);
  std::string device_failure();
  void tick();
  // Ends all; further ones are refused.
  void close();

  std::vector<Transfers::Reading> readings();

 private:
  class Outgoing;
  class Parted;
  using Key = std::pair<uint64_t, uint32_t>;  // to whom, first row
  struct Ask {
    std::shared_ptr<Link> link;
    uint64_t id;
    std::string request;
    uint32_t first_row;
    uint32_t n_rows;
    Deadline deadline;
    std::shared_ptr<const void> share;  // of what may be remembered
  };
  // Messages made under the lock, sent after it.
  struct Post {
    std::shared_ptr<Link> link;
    Kind kind;
    std::string body;
    uint32_t count = 1;
  };

  void add(const std::shared_ptr<Outgoing>& offer, const std::shared_ptr<Link>& link,
           std::vector<Post>* posts);
  bool overlaps(const Outgoing& offer);
  static bool is_wanted(const Ask& ask, const Outgoing& offer);
  bool is_asked_for(const Outgoing& offer) const;
  bool takes_directly(const Outgoing& offer, Link& link) const;
  void tell(Outgoing& offer, std::vector<Post>* posts);
  void tell_one(Outgoing& offer, const std::shared_ptr<Link>& link, uint64_t ask, std::vector<Post>* posts);
  void remember_gone(const Outgoing& offer);
  void refuse_gone(const Ask& ask, std::vector<Post>* posts);
  void forget(const Link& link);
  bool judge(const std::shared_ptr<Link>& link, wire::Reader& body, std::string* verdicts,
             std::vector<Post>* posts);
  void end(Outgoing& offer, RowStatus reason, std::vector<Post>* posts);
  static void send_if_several(std::vector<Post>* posts);
  static void send(const std::vector<Post>& posts);

  // outbox_split.cc
  std::vector<std::shared_ptr<Outgoing>> split(const Rows& rows, PlacedRows placed, const Deadline& lease,
                                               std::string* error);
  void end_rest(const Outgoing& taken, std::vector<Post>* posts);

  // outbox_staging.cc
  // Null: no memory of devices was registered, or this is closed.
  std::shared_ptr<StagingArea> staging_of_devices();
  void queue_staging(const std::shared_ptr<Outgoing>& offer);
  void stage();
  bool take_first();
  bool needs_room(const Outgoing& offer) const;
  void stage_one(std::unique_lock<std::mutex>& lock);
  void tell_behind(const Outgoing& first, std::vector<Post>* posts);
  bool is_unwanted(const Outgoing& offer);
  void unstage(Outgoing& offer);
  void unstage_unwanted(std::vector<Post>* posts);
  void renumber(const std::shared_ptr<Outgoing>& offer, std::vector<Post>* posts);

  // outbox_stowing.cc
  std::optional<Stowed> stow(const std::shared_ptr<Outgoing>& offer);
  void stow_now(const std::shared_ptr<Outgoing>& offer, std::unique_lock<std::mutex>& lock);
  bool copy_to(Block& block, Outgoing& offer);
  void offer_copy(const std::shared_ptr<Outgoing>& offer, std::shared_ptr<Block> block,
                  std::vector<Post>* posts);

  const std::vector<std::string> ways_;
  std::shared_ptr<Arena> pool_;  // null: there is none
  // Some hundred thousand asks that wait for their rows.
  const std::shared_ptr<Shares> shares_ = std::make_shared<Shares>(32 << 20);
  std::mutex mutex_;  // guards all below, and what of the offers changes
  std::unordered_map<uint64_t, std::shared_ptr<Outgoing>> live_;  // by id
  std::unordered_map<std::string, std::map<Key, std::shared_ptr<Outgoing>>> by_request_;
  std::list<Ask> asks_;
  GoneRows gone_;
  uint64_t next_id_;
  bool is_closed_ = false;
  uint64_t n_offered_ = 0;
  uint64_t n_taken_ = 0;
  uint64_t n_taken_bytes_ = 0;
  uint64_t n_withdrawn_ = 0;
  uint64_t n_lapsed_ = 0;
  uint64_t n_late_ = 0;
  uint64_t n_refused_asks_ = 0;
  uint64_t n_gone_asks_ = 0;
  uint64_t n_staged_bytes_ = 0;
  uint64_t n_stowed_ = 0;
  uint64_t n_stowed_bytes_ = 0;
  uint64_t n_unstowed_ = 0;
  std::set<const Outgoing*> stowing_;                    // which are being copied to the pool now
  std::shared_ptr<StagingArea> staging_;                 // null: no memory of devices was registered
  std::deque<std::shared_ptr<Outgoing>> staging_queue_;  // in the order of offering and asking
  std::shared_ptr<Outgoing> copying_;                    // by the stager, now
  cuda::Staging::Loan room_;                             // for the first of the queue
  std::string device_failure_;
  std::condition_variable to_stage_;  // something is queued, or there is room
  std::condition_variable copied_;
  NamedThread stager_;  // last: it uses all of the above
};

}  // namespace p2pkv::offers
