// One question to the owners of some keys: who is asked for which of them, and who has answered. Python sends
// the requests and decides how long to wait; what is done per key is here.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "directory/ring_table.h"
#include "page/location.h"

namespace p2pkv {

// Numbers what one node says of its pages: what has a larger number was seen later. Thread-safe.
class Sequences {
 public:
  uint64_t next() { return last_.fetch_add(1) + 1; }

 private:
  std::atomic<uint64_t> last_{0};
};

// Used by one thread. Asks are numbered in the order in which they are made; one that is sealed takes no more
// rows.
class AskBatch {
 public:
  enum class Order {
    kTogether,  // a row's owners are all asked at once
    kInTurn,    // the first; each next one when those before did not find it, or when it is hurried
    kDoubted,   // all at once, those that are not healthy as well
  };

  // Rows of one ask: few enough that an owner answers the first while the next are still on their way, many
  // enough that what a message costs by itself is little. Measured with 1,024 keys: 128, 256 and 512 differ
  // by less than the noise, one message of all takes a fifth longer.
  static constexpr size_t kMaxRows = 256;

  struct Ask {
    int32_t owner;
    std::vector<uint32_t> rows;
    bool is_answered = false;
    bool is_hurried = false;
    bool is_excused = false;
  };

  // Rows with `is_done` set are left out; null: none is.
  AskBatch(const Key* keys, size_t n, const uint8_t* is_done, std::shared_ptr<const RingTable> ring,
           Order order = Order::kTogether);
  // Each row is asked of one member, whether or not that owns its entry; -1: of nobody.
  AskBatch(const int32_t* members, size_t n, std::shared_ptr<const RingTable> ring);
  // Makes the question that follows one in turn: it asks about all rows that nobody has answered, and puts
  // them to the members that were passed over, too, since one that was suspected may be there all the same.
  // Null while no row needs one of these. They are waited for as the silent are, and a healthy owner of a row
  // longer, whatever they say, since entries may have been put past a suspect. Whoever has refused is not
  // counted as healthy again.
  std::unique_ptr<AskBatch> of_doubted(const Key* keys) const;

  const std::deque<Ask>& asks() const { return asks_; }
  // Who is asked, or may be when their turn comes.
  const std::vector<int32_t>& owners() const { return owners_; }
  // Seals all asks, and returns the number of the first that was not sealed yet.
  size_t seal();
  // Asks the next owners of this ask's rows, which is late. Does nothing the second time.
  void hurry(size_t ask);
  // Asks all owners of the rows that this member owns: whoever asks it does not know when it is late.
  void ask_together(int32_t member);
  // Adds to each row a member that is asked as its owners are, -1 for none; before anything is sealed.
  void add(const int32_t* members);
  // The records of an ask's rows, one after another.
  std::string body(size_t ask, const uint8_t* records, size_t record_size) const;

  // The owner has done what it was asked.
  void acknowledge(size_t ask);
  // The owner has looked its rows up: `found` and `locations` of the rows that it has are filled in, and
  // these rows need no other answer. False, and as refused, if the reply has a wrong length.
  bool take_found(size_t ask, std::string_view reply, uint8_t* found, Location* locations);
  // The same of a reply whose locations are columns, and which may name several holders of a row: the first
  // goes to `locations`, the others to `others`, if that is not null.
  struct RowHolders {
    uint32_t row;
    std::vector<Location> locations;
  };
  bool take_located(size_t ask, std::string_view reply, uint8_t* found, Location* locations,
                    std::vector<RowHolders>* others = nullptr);
  // The owner has said of each of its rows whether it is so, which goes to `flags`. As take_found otherwise.
  bool take_flags(size_t ask, std::string_view reply, uint8_t* flags);
  // The owner's answer is not needed any more: it is not silent.
  void excuse(size_t ask) { asks_.at(ask).is_excused = true; }
  // The owner could not do it.
  void refuse(size_t ask);

  // Whether every row is done, or has no owner left that could answer.
  bool is_settled() const { return n_open_ == 0; }
  // Whether each row that is not done has been answered by some owner, or `of_doubted` is to be asked: the
  // silent need not be waited for much longer.
  bool is_heard() const { return n_unheard_ == 0 || n_doubted_ > 0; }
  // For each row whether some owner, the asking member included, has answered.
  const std::vector<uint8_t>& answered() const { return answered_; }
  // Says for each row whether somebody may still answer.
  std::vector<uint8_t> waiting() const;
  // Who has not answered an ask and was not excused, once for each.
  std::vector<int32_t> silent() const;
  // Members that own rows and are not healthy, so that they were not asked.
  std::vector<int32_t> passed_over() const { return passed_over_; }

 private:
  struct Row {
    const int32_t* owners = nullptr;  // as the ring has them
    uint32_t next = 0;                // the first of them whose turn has not come
    int waiting = 0;                  // owners that may still answer, whether or not they are asked yet
    int trusted = 0;                  // those of them that are waited for until the deadline
    bool is_done = false;
    bool is_heard = false;     // one of these, or the asking member, has answered
    bool is_left_out = false;  // nobody is asked
    bool is_doubted = false;   // an owner was passed over
  };

  AskBatch(std::shared_ptr<const RingTable> ring, size_t n);
  void ask_owners(const Key* keys, const uint8_t* is_done, Order order);

  // Counts on an answer of this member; false if it can't give one.
  bool expect(uint32_t row, int32_t owner, Order order);
  void place(uint32_t row, int32_t owner);
  void assign(uint32_t row, int32_t owner);
  void ask_next(uint32_t row);
  void count(uint32_t row);
  bool is_peer(int32_t owner) const {
    return owner != ring_->own_index && ring_->is_healthy[static_cast<size_t>(owner)] != 0;
  }
  void update(uint32_t row, int32_t owner, bool has_answered, bool is_done);
  // How many rows of an ask the reply says are found; nothing if it is too short to say so.
  static std::optional<size_t> count_found(std::string_view reply, size_t n_rows);
  // How many holders of an ask's rows the reply names; nothing if it is too short, or names more than it may.
  static std::optional<size_t> count_named(std::string_view reply, size_t n_rows);
  // The first of each row's holders; the others go to `others`.
  static std::vector<Location> take_first(const std::vector<uint32_t>& rows, std::string_view named,
                                          const std::vector<Location>& all, std::vector<RowHolders>* others);
  // Takes what is known to have the right length, with a location for each row that is found.
  void take(size_t ask, std::string_view is_found, const char* next, uint8_t* found, Location* locations);
  bool is_open(uint32_t row) const { return !rows_[row].is_done && rows_[row].waiting > 0; }
  bool is_trusted(int32_t owner) const {
    const auto member = static_cast<size_t>(owner);
    return ring_->is_healthy[member] != 0 && (refused_before_.empty() || refused_before_[member] == 0);
  }
  bool is_unheard(uint32_t row) const {
    return is_open(row) && rows_[row].trusted > 0 && !rows_[row].is_heard;
  }
  bool is_in_doubt(uint32_t row) const {
    return rows_[row].is_doubted && !rows_[row].is_done && answered_[row] == 0;
  }

  const std::shared_ptr<const RingTable> ring_;
  std::deque<Ask> asks_;  // grows while one of them is looked at
  size_t n_sealed_ = 0;
  std::vector<int> latest_ask_of_;  // by member: the ask that took rows last, or -1
  std::vector<uint8_t> is_owner_;   // by member: it is among `owners_`
  std::vector<int32_t> owners_;
  std::vector<Row> rows_;
  std::vector<uint8_t> answered_;
  std::vector<int32_t> passed_over_;
  std::vector<uint8_t> has_refused_;     // by member; empty: nobody has
  std::vector<uint8_t> refused_before_;  // the same of the question that this one follows
  size_t n_open_ = 0;
  size_t n_unheard_ = 0;
  size_t n_doubted_ = 0;  // rows
};

}  // namespace p2pkv
