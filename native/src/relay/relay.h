// Passes the events of many streams on, from engines to clients, once their first event was judged.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "relay/answer_body.h"
#include "relay/event_stream.h"
#include "relay/patience.h"

namespace p2pkv {

// The descriptors are copies of their owner's, who must neither read from the engine nor write to the client
// meanwhile, and who may close its own at any time. A client gets whole events only, as chunks of HTTP/1.1
// without the last one. Of a stream no more than one read, and one event, lie here: a client that takes
// nothing makes its engine wait.
//
// One thread uses it: the owner's event loop, which waits for `fd()` to be readable and then calls run().
class Relay {
 public:
  static constexpr uint64_t kNone = 0;

  enum class End : uint8_t {
    kWhole,       // the stream is complete, and the client's socket has all of it
    kEndedEarly,  // the answer is complete, but the stream is not
    kHungUp,      // the engine ended the connection
    kNoHttp,
    kTooLarge,      // an event has more than EventStream::kMaxEvent bytes
    kEngineSilent,  // for longer than its patience
    kClientSlow,    // it did not take what was there for it in time
    kClientGone,
  };
  using Ended = std::pair<uint64_t, End>;

  Relay();

  int fd() const { return epoll_.get(); }
  size_t size() const { return streams_.size(); }

  // Begins to pass on; returns the stream's name, or kNone if there are no descriptors for it. `patience` is
  // for the engine and may change meanwhile, `client_patience` for the client to take what there is, in
  // seconds.
  uint64_t add(int engine, int client, std::shared_ptr<AnswerBody> body, std::shared_ptr<EventStream> events,
               std::shared_ptr<const Patience> patience, double client_patience);
  // Does what can be done without waiting, one read a stream, for at most kMostReady of them. Returns those
  // that have ended; each must be removed.
  std::vector<Ended> run();
  // Ends the streams whose engine or client was waited for too long.
  std::vector<Ended> sweep();
  // Ends a stream; returns what its client must get first before it gets anything else. Later calls do
  // nothing.
  std::string remove(uint64_t name);

 private:
  static constexpr size_t kRead = 64 * 1024;
  static constexpr int kMostReady = 64;  // the loop that calls has others to serve

  struct Stream {
    UniqueFd engine, client;
    std::shared_ptr<AnswerBody> body;
    std::shared_ptr<EventStream> events;
    std::shared_ptr<const Patience> patience;  // for the engine
    double client_patience;
    int64_t waits_since;  // for the client if there is `unsent`, else for the engine
    std::string unsent;   // from `n_sent` on
    size_t n_sent = 0;
    bool has_ended = false;  // as `end` says, when all is sent
    End end = End::kWhole;
    bool is_reported = false;
  };

  bool watch(uint64_t name, const Stream& stream, bool engine) const;
  void unwatch(const Stream& stream) const;
  void read(uint64_t name, Stream& stream);
  void send(uint64_t name, Stream& stream);
  void flush(uint64_t name, Stream& stream);
  void end(Stream& stream, End why);
  void report(uint64_t name, Stream& stream, End why);

  UniqueFd epoll_;
  uint64_t last_name_ = kNone;
  std::unordered_map<uint64_t, Stream> streams_;
  std::vector<Ended> ended_;
  int64_t now_ = 0;
  std::vector<char> read_;
  std::string payload_, whole_;  // of one read; kept for their memory
};

}  // namespace p2pkv
