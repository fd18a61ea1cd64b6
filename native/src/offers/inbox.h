// The receiver's side: offers that came, where their rows are to go, and pulling them.
//
// An offer waits until there is a grant for its request, or room in the receive buffers; then a thread of its
// peer's Puller reads the rows, and they count once the producer has answered that the offer was valid all
// the time.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "offers/landing.h"
#include "offers/link.h"
#include "offers/offer_messages.h"
#include "offers/puller.h"
#include "offers/receive_buffers.h"
#include "offers/row_memories.h"
#include "offers/shares.h"
#include "offers/transfers.h"

namespace p2pkv::offers {

class Inbox : public std::enable_shared_from_this<Inbox> {
 public:
  explicit Inbox(const Transfers::Options& options) : options_(options) {}
  bool start(std::string* error) { return buffers_.start(options_, error); }
  // Rows for devices go through this from now on; called once. False, with the reason in `error`: the memory
  // for rows that come before their grant can't be page-locked.
  bool start_landing(std::shared_ptr<Landing> landing, const std::shared_ptr<cuda::Device>& device,
                     std::string* error);

  // For whoever puts. Null, with the reason in `error`, if the request is granted already.
  std::shared_ptr<Grant> grant(Rows rows, PlacedRows placed, const Deadline& deadline, std::string* error);
  // Asks the peer at the other end of `from`; without one it is lost already. More rows than an ask has are
  // asked for in several, and end together.
  std::shared_ptr<Grant> get(const std::shared_ptr<Link>& from, Rows rows, PlacedRows placed,
                             const Deadline& deadline);
  // Ends the grants that lie in this memory.
  void revoke_memory(uint32_t memory_id);

  // What came over links; false for what no node of ours would send.
  bool offered(const std::shared_ptr<Link>& link, uint32_t count, wire::Reader body);
  bool settled(const Link& link, uint32_t count, wire::Reader body);
  bool withdrawn(const Link& link, wire::Reader body);
  bool gone(const Link& link, uint32_t count, wire::Reader body);
  void replied(const Link& link, const wire::Header& header, wire::Reader body);

  void lost(const Link& link);
  void tick();
  // Ends all, further grants are refused; waits for the threads.
  void close();

  std::vector<Transfers::Reading> readings();
  // Null if there is none.
  const std::shared_ptr<Arena>& buddy_pool() const { return buffers_.pool(); }
  // Null if there are none.
  std::shared_ptr<Landing> landing_of_devices();

 private:
  class Granted;
  class Asked;
  struct Request;
  struct Incoming;
  struct StoredRow;
  struct Backlog;
  struct Batch;
  using Clock = Deadline::Clock;
  using Jobs = std::vector<std::pair<std::shared_ptr<PullJob>, std::shared_ptr<Puller>>>;
  using OfferKey = std::pair<uint64_t, uint64_t>;  // link, offer

  // inbox_grants.cc
  std::shared_ptr<Granted> add_grant(const std::shared_ptr<Request>& request, const Rows& rows,
                                     PlacedRows placed, const Deadline& deadline);
  void settle_row(Granted& grant, size_t row, RowStatus status);
  void settle_rows(Granted& grant, uint64_t first, uint64_t end, RowStatus status);
  void close_grant(Granted& grant, RowStatus reason);
  std::shared_ptr<Granted> ask(const std::shared_ptr<Link>& from, const Rows& rows, PlacedRows placed,
                               const Deadline& deadline);
  void revoke(const std::vector<std::shared_ptr<Granted>>& grants, RowStatus reason);
  void break_off(const Jobs& jobs);
  void begin_writing(Granted& grant);
  void end_writing(Granted& grant);

  // inbox_stored.cc
  void take_stored(Granted& grant, const Deadline& until, bool waits);
  void claim_stored(Granted& grant);
  bool copy_stored(Granted& grant, const Deadline& until, std::unique_lock<std::mutex>& lock);
  void settle_stored(Granted& grant, RowStatus status);

  // inbox.cc
  RowStatus take_message(const std::shared_ptr<Link>& link, OfferMessage message);
  bool take_offer(const std::shared_ptr<Incoming>& incoming, uint64_t ask, const std::string& name);
  void end(Incoming& incoming);
  void pass_on(Incoming& incoming);
  void end_for_next(Incoming& incoming, RowStatus status);
  void fail_rows(Incoming& incoming, RowStatus status);
  void drop_unused(const std::shared_ptr<Request>& request);
  void queue(const std::shared_ptr<Backlog>& backlog);

  // inbox_pulls.cc
  void pull(const std::shared_ptr<Backlog>& backlog);
  bool fill(Batch& batch, Backlog& backlog);
  bool place(Batch& batch, const std::shared_ptr<Incoming>& incoming);
  static bool can_take(const Batch& batch, const Incoming& incoming);
  void have_staged(Batch& batch, const std::shared_ptr<Incoming>& incoming);
  void match(Incoming& incoming, Granted& grant, std::vector<std::pair<size_t, size_t>>* rows);
  void conclude(Batch& batch, Backlog& backlog, std::string* reports, uint32_t* n_reports);
  void let_go_of_rows(Incoming& incoming, Granted& grant);
  void conclude_one(Batch& batch, const std::shared_ptr<Incoming>& incoming, std::string* reports,
                    uint32_t* n_reports);
  void prove(const std::shared_ptr<Incoming>& incoming, bool is_valid);

  const Transfers::Options options_;
  ReceiveBuffers buffers_;
  // A row takes 25 bytes: some ten million rows that wait for their grants.
  const std::shared_ptr<Shares> shares_ = std::make_shared<Shares>(256 << 20);
  std::atomic<uint64_t> n_fallbacks_{0};  // beside those that the peer layer counts
  std::mutex landing_mutex_;              // guards landing_
  std::shared_ptr<Landing> landing_;      // null: no memory of devices was registered
  std::mutex mutex_;                      // guards all below, and what is in it
  std::unordered_map<std::string, std::shared_ptr<Request>> requests_;  // that are put
  std::map<uint64_t, std::shared_ptr<Request>> asks_;                   // that are asked for
  std::map<OfferKey, std::shared_ptr<Incoming>> incoming_;              // not stored yet
  std::map<uint64_t, std::shared_ptr<Puller>> pullers_;                 // by link
  std::vector<std::shared_ptr<Puller>> retired_;                        // of lost links
  std::set<std::shared_ptr<Granted>> grants_;                           // open ones
  std::set<std::shared_ptr<Granted>> writing_;  // into which something writes now, open or not
  std::set<std::pair<std::shared_ptr<PullJob>, std::shared_ptr<Puller>>> jobs_;
  uint64_t last_ask_ = 0;
  bool is_closed_ = false;
  uint64_t n_granted_rows_ = 0;
  uint64_t n_pulled_bytes_ = 0;
  uint64_t n_buffered_rows_ = 0;
  uint64_t n_pooled_rows_ = 0;
  uint64_t n_parked_offers_ = 0;
  uint64_t n_refused_offers_ = 0;
  uint64_t n_claimed_rows_ = 0;
  uint64_t n_rejected_rows_ = 0;
  uint64_t n_failed_rows_ = 0;
  uint64_t n_duplicate_rows_ = 0;
  uint64_t n_expired_rows_ = 0;
};

}  // namespace p2pkv::offers
