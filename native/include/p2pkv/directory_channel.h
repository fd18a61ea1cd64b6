// A connection to another node's shard, and asking several of them at once.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "p2pkv/ask_batch.h"
#include "p2pkv/clock.h"
#include "p2pkv/location.h"
#include "p2pkv/wire.h"

namespace p2pkv {

class SealedStream;

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
  DirectoryChannel(std::unique_ptr<SealedStream> stream, uint64_t boot);
  ~DirectoryChannel();

  // Tells the owner that what it promoted under this lease need not be kept any longer. Waits for nothing.
  // False: the channel is broken.
  bool release(uint64_t lease);

  // A call under way finds its owner gone, and so does every later one.
  void interrupt();

 private:
  friend class DirectoryExchange;

  const std::unique_ptr<SealedStream> stream_;
  const uint64_t boot_;
  const int pid_;
  uint64_t last_id_ = 0;
};

// What is asked: `kind` and for each row of the batch a record.
struct DirectoryQuestion {
  wire::Kind kind;
  const uint8_t* records;
  size_t record_size;
  // Where answers to GET go, a row each; null for the other kinds.
  uint8_t* found = nullptr;
  Location* locations = nullptr;
};

// The channel to an owner, by its index in the ring's table.
struct DirectoryLine {
  int32_t owner;
  std::shared_ptr<DirectoryChannel> channel;
};

// One question to several owners: asked when it is made, answered in `wait`. Used by one thread. The batch,
// and where answers go, must outlive it. If it ends without `wait` its channels can't be used again.
class DirectoryExchange {
 public:
  // Sends every ask of the batch over its owner's channel, one after another; waits for nothing.
  DirectoryExchange(AskBatch& batch, const DirectoryQuestion& question,
                    const std::vector<DirectoryLine>& lines);

  // Takes the answers as they come. Returns when no row needs another answer, at `deadline`, or, if each row
  // has been answered by someone, at `patience`. Says of each line whether its channel can be used again.
  std::vector<uint8_t> wait(const Deadline& deadline, const Deadline& patience);

 private:
  struct Sent {
    size_t ask;
    uint64_t id;
  };
  struct Line {
    std::shared_ptr<DirectoryChannel> channel;
    int32_t owner;
    std::deque<Sent> waiting;  // for answers, which come in this order
    bool is_lost;

    SealedStream& stream() const { return *channel->stream_; }
  };

  bool is_any_waiting() const;
  void send(size_t ask);
  void spin();
  void wait_until(const Deadline& until);
  void advance(Line& line);
  void take(Line& line, std::string_view message);
  void lose(Line& line);

  AskBatch& batch_;
  const DirectoryQuestion question_;  // its records are not read after the constructor
  std::vector<Line> lines_;
};

}  // namespace p2pkv
