// The producer's side: what this node offers, who asks for it, and whether an offer is still valid.
//
// This is where the proof of a pull is made. A receiver tells when it has the last byte; only then, and under
// the same lock as every withdrawal, it is decided whether the offer was valid all the time. An offer's id
// never names another one, and an ended one never comes back.
#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "link.h"
#include "memories.h"
#include "p2pkv/transfers.h"

namespace p2pkv::offers {

class Outbox : public std::enable_shared_from_this<Outbox> {
 public:
  Outbox();

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

  void lost(const Link& link);
  void tick();
  // Ends all; further ones are refused.
  void close();

  std::vector<Transfers::Reading> readings();

 private:
  class Outgoing;
  using Key = std::pair<uint64_t, uint32_t>;  // to whom, first row
  struct Ask {
    std::shared_ptr<Link> link;
    uint64_t id;
    std::string request;
    uint32_t first_row;
    uint32_t n_rows;
    Deadline deadline;
  };
  // Messages made under the lock, sent after it.
  struct Post {
    std::shared_ptr<Link> link;
    Kind kind;
    std::string body;
  };

  bool overlaps(const Outgoing& offer);
  void tell_askers(const std::shared_ptr<Outgoing>& offer, std::vector<Post>* posts);
  void tell(Outgoing& offer, const std::shared_ptr<Link>& link, uint64_t ask, std::vector<Post>* posts);
  bool judge(const std::shared_ptr<Link>& link, wire::Reader& body, std::string* verdicts);
  void end(Outgoing& offer, RowStatus reason, std::vector<Post>* posts);
  static void send(const std::vector<Post>& posts);

  std::mutex mutex_;  // guards all below, and what of the offers changes
  std::unordered_map<uint64_t, std::shared_ptr<Outgoing>> live_;  // by id
  std::unordered_map<std::string, std::map<Key, std::shared_ptr<Outgoing>>> by_request_;
  std::list<Ask> asks_;
  uint64_t next_id_;
  bool is_closed_ = false;
  uint64_t n_offered_ = 0;
  uint64_t n_taken_ = 0;
  uint64_t n_taken_bytes_ = 0;
  uint64_t n_withdrawn_ = 0;
  uint64_t n_lapsed_ = 0;
  uint64_t n_late_ = 0;
};

}  // namespace p2pkv::offers
