// One question to the owners of some keys: who is asked for which of them, and who has answered. Python sends
// the requests and decides how long to wait; what is done per key is here.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "p2pkv/location.h"

namespace p2pkv {

// The ring of one view, as p2pkv/directory/ring.py computes it. Never changes.
struct RingTable {
  std::vector<uint64_t> points;  // sorted
  std::vector<int32_t>
      successors;  // for each point `replicas` member indexes, -1 where there are fewer members
  size_t replicas;
  std::vector<uint8_t> is_healthy;  // by member: worth asking
  int32_t own_index;  // of the member that asks; it is never asked, and counts as having answered

  // The `replicas` owners of a key.
  const int32_t* owners_of(const Key& key) const;
  // The members that must be asked to reach every owner of the keys: healthy, and not the one that asks.
  std::vector<int32_t> peers_of(const Key* keys, size_t n) const;
};

// Numbers what one node says of its pages: what has a larger number was seen later. Thread-safe.
class Sequences {
 public:
  uint64_t next() { return last_.fetch_add(1) + 1; }

 private:
  std::atomic<uint64_t> last_{0};
};

// Used by one thread.
class AskBatch {
 public:
  // Rows of one ask: few enough that an owner answers the first while the next are still on their way, many
  // enough that what a message costs by itself is little. Measured with 1,024 keys: 128, 256 and 512 differ
  // by less than the noise, one message of all takes a fifth longer.
  static constexpr size_t kMaxRows = 256;

  struct Ask {
    int32_t owner;
    std::vector<uint32_t> rows;
    bool is_answered = false;
  };

  // Rows with `is_done` set are left out; null: none is.
  AskBatch(const Key* keys, size_t n, const uint8_t* is_done, std::shared_ptr<const RingTable> ring);
  // Each row is asked of one member, whether or not that owns its entry; -1: of nobody.
  AskBatch(const int32_t* members, size_t n, std::shared_ptr<const RingTable> ring);

  const std::vector<Ask>& asks() const { return asks_; }
  // The records of an ask's rows, one after another.
  std::string body(size_t ask, const uint8_t* records, size_t record_size) const;

  // The owner has done what it was asked.
  void acknowledge(size_t ask);
  // The owner has looked its rows up: `found` and `locations` of the rows that it has are filled in, and
  // these rows need no other answer. False, and as refused, if the reply has a wrong length.
  bool take_found(size_t ask, std::string_view reply, uint8_t* found, Location* locations);
  // The owner could not do it.
  void refuse(size_t ask);

  // Whether every row is done, or has no owner left that could answer.
  bool is_settled() const { return n_open_ == 0; }
  // Whether each row that is not done has been answered by some owner: the silent need not be waited for much
  // longer.
  bool is_heard() const { return n_unheard_ == 0; }
  // For each row whether some owner, the asking member included, has answered.
  const std::vector<uint8_t>& answered() const { return answered_; }
  // Who has not answered an ask, once for each.
  std::vector<int32_t> silent() const;
  // Members that own rows and are not healthy, so that they were not asked.
  std::vector<int32_t> passed_over() const { return passed_over_; }

 private:
  struct Row {
    int waiting = 0;
    bool is_done = false;
  };

  void assign(uint32_t row, int32_t owner);
  void update(uint32_t row, bool has_answered, bool is_done);
  bool is_open(uint32_t row) const { return !rows_[row].is_done && rows_[row].waiting > 0; }

  const std::shared_ptr<const RingTable> ring_;
  std::vector<Ask> asks_;
  std::vector<int> latest_ask_of_;  // by member: the ask that still takes rows, or -1
  std::vector<Row> rows_;
  std::vector<uint8_t> answered_;
  std::vector<int32_t> passed_over_;
  size_t n_open_ = 0;
  size_t n_unheard_ = 0;
};

}  // namespace p2pkv
