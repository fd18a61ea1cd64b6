// A connection to another node's shard, and asking several of them at once.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "directory/ask_batch.h"
#include "directory/other_holders.h"
#include "net/wire.h"
#include "page/location.h"

namespace p2pkv {

class SealedStream;
class SpinPermit;

// Leased to one call at a time; `interrupt` may be called by any thread.
class DirectoryChannel {
 public:
  // What to send the owner with CONNECT.
  static std::string request();

  // Connects to `door`, the owner's answer, and asks it for nothing, so that a channel that is there works.
  // Blocks for `timeout` seconds at most. `boot`: the boot epoch that requests are meant for. Null, with the
  // reason in `error`.
  static std::shared_ptr<DirectoryChannel> open(std::string_view door, uint64_t boot, double timeout,
                                                std::string* error);
  // `locates`: the owner answers LOCATE.
  DirectoryChannel(std::unique_ptr<SealedStream> stream, uint64_t boot, bool locates);
  ~DirectoryChannel();

  // Tells the owner that what it promoted under this lease need not be kept any longer. Waits for nothing.
  // False: the channel is broken.
  bool release(uint64_t lease);

  // Tells the owner that these of its pages were read, those that are to stay longest first, and waits for
  // nothing: its answers are skipped. Nothing is told while many are still to come, nor to an owner that does
  // not know of touches.
  struct Told {
    bool is_usable;  // else the channel is broken
    size_t n_pages;
  };
  Told touch(const Key* keys, size_t n);

  // Answers that nobody waits for any more and that have not come yet; whoever asks next skips them.
  size_t n_late() const { return late_.size(); }

  // A call under way finds its owner gone, and so does every later one.
  void interrupt();

 private:
  friend class DirectoryExchange;

  // Touches in a message, and messages whose answers may be to come before no further one is sent: what an
  // owner that reads nothing is sent is bounded, and few look-ups wait behind many touches.
  static constexpr size_t kTouchesAMessage = 512;
  static constexpr size_t kMostUnanswered = 8;

  // Takes what has come of the answers that nobody waits for; false if the channel is broken.
  bool take_late();
  // Takes a message for the first of these. False if it is another one.
  bool skip(const wire::Header& header);

  const std::unique_ptr<SealedStream> stream_;
  const uint64_t boot_;
  const bool locates_;
  const int pid_;
  bool knows_touches_ = true;  // until it says otherwise
  uint64_t last_id_ = 0;
  std::deque<uint64_t> late_;  // ids of their questions, in the order in which they come
};

// A question says what is asked (`kind`) and points to a record for each row, which outlives the exchange.
struct DirectoryQuestion {
  wire::Kind kind;
  const uint8_t* records;
  size_t record_size;
  // Where answers to GET, HELD and PROMOTE go, a row each, and those to CHECK, which have no locations; null
  // for the other kinds.
  uint8_t* found = nullptr;
  Location* locations = nullptr;
  // Where a GET puts the holders that are named beside the first; null: only one is asked for.
  OtherHolders* others = nullptr;
};

// Takes an owner's answer to LOCATE, of whichever way it came: as AskBatch::take_located, and all that are
// named go where the question says. False, and as refused, if the reply has a wrong length.
bool take_located(AskBatch& batch, const DirectoryQuestion& question, size_t ask, std::string_view reply);

// The channel to an owner, by its index in the ring's table.
struct DirectoryLine {
  int32_t owner;
  std::shared_ptr<DirectoryChannel> channel;
};

// One question to several owners: asked when it is made, answered in `wait`. Used by one thread. The batch,
// and where answers go, must outlive it. If it ends without `end` its channels can't be used again.
class DirectoryExchange {
 public:
  // Sends every ask of the batch over its owner's channel, one after another; waits for nothing. Asks of
  // owners without a line are left to the caller.
  DirectoryExchange(AskBatch& batch, const DirectoryQuestion& question,
                    const std::vector<DirectoryLine>& lines);

  // Takes the answers as they come, and asks those whose turn it is then. Returns when no row needs another
  // answer, when nobody on a line has one to give, at `deadline`, or, if each row has been answered by
  // someone, at `patience`.
  void wait(const Deadline& deadline, const Deadline& patience);
  // Whether somebody on a line has an answer to give.
  bool is_any_waiting() const;
  // Says of each line whether its channel can be used again: answers that have not come are skipped there.
  // Those of whom none was needed are no silent ones, unless `patience` had passed.
  std::vector<uint8_t> end(const Deadline& patience);

 private:
  // How long an owner is waited for before the next one of its rows is asked as well: several times what an
  // answer takes, and nothing beside the time that a fetch takes.
  static constexpr std::chrono::microseconds kTurn{1500};
  // Late answers that a channel may owe: an owner that is merely busy catches up, and what it owes is
  // bounded.
  static constexpr size_t kMostLate = 16;

  struct Sent {
    size_t ask;
    uint64_t id;
    wire::Kind kind;
    Deadline turn;
  };
  struct Line {
    std::shared_ptr<DirectoryChannel> channel;
    int32_t owner;
    std::deque<Sent> waiting;  // for answers, which come in this order
    bool is_lost;

    SealedStream& stream() const { return *channel->stream_; }
  };

  void send_unsealed();
  void send(size_t ask);
  // Asks the next owners where the first is late; returns when the next one will be.
  Deadline::Clock::time_point hurry();
  void spin(const SpinPermit& permit);
  void wait_until(const Deadline& until);
  void advance(Line& line);
  void take(Line& line, std::string_view message);
  void lose(Line& line);

  AskBatch& batch_;
  const DirectoryQuestion question_;
  std::vector<Line> lines_;
};

}  // namespace p2pkv
