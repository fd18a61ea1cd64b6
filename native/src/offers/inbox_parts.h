// What an Inbox is made of; for its own files. All of it is guarded by the inbox's lock.
#pragma once

#include <algorithm>

#include "offers/inbox.h"

namespace p2pkv::offers {

// A row that lies in the receive buffers and is to be copied to its place in a grant.
struct Inbox::StoredRow {
  std::shared_ptr<Incoming> incoming;
  size_t row;
  size_t place;
  uint64_t from;  // in the block
  uint64_t n_copied;
};

// Where rows of a request go.
class Inbox::Granted final : public Grant, public std::enable_shared_from_this<Inbox::Granted> {
 public:
  Granted(std::shared_ptr<Inbox> home, std::shared_ptr<Request> request, const Rows& rows, PlacedRows placed,
          const Deadline& deadline)
      : request(std::move(request)),
        first_row(rows.first_row),
        placed(std::move(placed)),
        deadline(deadline),
        point(StreamPoint::mark(rows.stream, this->placed)),
        statuses_now(this->placed.rows.size(), RowStatus::kPending),
        is_taken(this->placed.rows.size(), 0),
        n_pending(this->placed.rows.size()),
        home_(std::move(home)) {}

  bool done() override;
  void wait(const Deadline& until) override;
  void revoke(RowStatus reason) override { home_->revoke({shared_from_this()}, reason); }
  RowStatuses statuses() override;

  // Nothing writes to the memory, and nothing will.
  bool is_over() const { return n_pending == 0 && n_writing == 0; }

  std::shared_ptr<Request> request;  // null once it is closed
  const uint32_t first_row;
  const PlacedRows placed;
  const Deadline deadline;
  const std::shared_ptr<StreamPoint> point;  // null: nothing to wait for
  RowStatuses statuses_now;
  std::vector<uint8_t> is_taken;  // by an offer that is pulled or proven now; no other may write to it
  size_t n_pending;
  size_t n_writing = 0;           // pulls and copies under way
  std::deque<StoredRow> to_copy;  // claimed from the receive buffers; of an open grant only
  bool is_copying = false;        // by a call; one at a time
  bool has_news = true;           // something was stored, or left to be copied, since it was looked for
  std::atomic<bool> is_closed = false;
  Jobs jobs;
  std::condition_variable changed;

 private:
  const std::shared_ptr<Inbox> home_;
};

// A get of more rows than an ask has: what is asked for at once, and ends at once.
class Inbox::Asked final : public Grant {
 public:
  Asked(std::shared_ptr<Inbox> home, std::vector<std::shared_ptr<Granted>> parts)
      : home_(std::move(home)), parts_(std::move(parts)) {}

  bool done() override {
    return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->done(); });
  }
  void wait(const Deadline& until) override {
    for (const auto& part : parts_) part->wait(until);
  }
  void revoke(RowStatus reason) override { home_->revoke(parts_, reason); }
  RowStatuses statuses() override {
    RowStatuses all;
    for (const auto& part : parts_) {
      const RowStatuses some = part->statuses();
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }

 private:
  const std::shared_ptr<Inbox> home_;
  const std::vector<std::shared_ptr<Granted>> parts_;
};

// The rows of one name: those that are put by anybody, or those that one peer is asked for.
struct Inbox::Request {
  std::string name;
  uint64_t ask = 0;            // 0: they are put
  std::shared_ptr<Link> from;  // that is asked
  std::shared_ptr<Granted> grant;
  std::map<uint64_t, std::shared_ptr<Backlog>> backlogs;  // by link
  std::map<uint32_t, std::shared_ptr<Incoming>> live;     // by first row; they don't overlap
  std::vector<std::shared_ptr<Incoming>> stored;
};

// The offers of one peer for one request that wait for their pull, in the order in which they were made.
struct Inbox::Backlog {
  std::weak_ptr<Request> request;
  std::shared_ptr<Puller> puller;
  std::deque<std::shared_ptr<Incoming>> waiting;
  bool is_queued = false;   // with the puller
  bool is_running = false;  // so that two threads don't pull out of order
};

struct Inbox::Incoming {
  enum class State { kWaiting, kPulling, kProving, kStored, kEnded };

  Incoming(std::shared_ptr<Link> link, OfferMessage message, std::shared_ptr<const void> share)
      : link(std::move(link)),
        offer(message.record.offer),
        ask(message.record.ask),
        first_row(message.record.first_row),
        rows(std::move(message.rows)),
        padded_nbytes(message.padded_nbytes),
        lease(after_ms(message.record.lease_ms)),
        share(std::move(share)),
        statuses(this->rows.size(), RowStatus::kPending) {}

  // The same, for another who asked for it.
  Incoming(const Incoming& other, uint64_t ask)
      : link(other.link),
        offer(other.offer),
        ask(ask),
        first_row(other.first_row),
        rows(other.rows),
        padded_nbytes(other.padded_nbytes),
        lease(other.lease),
        share(other.share),
        statuses(this->rows.size(), RowStatus::kPending) {}

  // What remembering it takes, about.
  static uint64_t cost(const OfferMessage& message) {
    return 512 + message.name.size() + message.rows.size() * (sizeof(RowRecord) + sizeof(RowStatus));
  }

  const std::shared_ptr<Link> link;
  const uint64_t offer;
  const uint64_t ask;  // 0: it is put
  const uint32_t first_row;
  const std::vector<RowRecord> rows;
  const uint64_t padded_nbytes;  // of a block for all of them
  const Deadline lease;
  const std::shared_ptr<const void> share;  // of what may be remembered
  std::weak_ptr<Request> request;
  State state = State::kWaiting;
  bool is_parked = false;
  RowStatuses statuses;           // a row
  std::shared_ptr<Granted> into;  // or
  std::shared_ptr<Block> block;   // into which they are pulled
  bool is_in_pool = false;
  Clock::time_point expires_at{};   // once stored
  std::vector<uint64_t> next_asks;  // whose turn it is, one after the other, if this one leaves it

  bool lies_on_device() const { return (rows.front().flags & kOnDevice) != 0; }
  uint32_t end_row() const { return first_row + static_cast<uint32_t>(rows.size()); }
  // What a row takes of the block.
  static uint64_t padded(uint64_t length) { return StagingArea::padded(length); }
};

// One read: rows of several offers of a backlog.
struct Inbox::Batch {
  std::shared_ptr<Request> request;
  std::shared_ptr<Granted> grant;  // null: into the receive buffers
  std::vector<std::shared_ptr<Incoming>> offers;
  std::vector<PullRow> rows;
  std::vector<std::pair<size_t, size_t>> places;   // of each row: its offer, and its number there
  std::vector<std::shared_ptr<Incoming>> at_once;  // nothing of them is to be pulled
  std::shared_ptr<Link> link;                      // that all of them came over
  std::string to_stage;                            // the numbers of offers, for their producer
  uint32_t n_to_stage = 0;
  uint64_t nbytes = 0;
  bool is_for_devices = false;  // some of it
  Deadline deadline = Deadline::after(0);
  std::shared_ptr<PullJob> job = std::make_shared<PullJob>();
};

}  // namespace p2pkv::offers
