// One reader's connection, as the owner serves it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/fd.h"
#include "transports/registered.h"
#include "transports/tcp/frames.h"
#include "transports/tcp/wire.h"

namespace p2pkv::tcp {

// Serves requests until the reader hangs up, misbehaves, makes no progress for kStallMs, or `stop` is
// readable.
//
// What makes a word come after its bytes: it is loaded once the wire has taken the last byte of the chunk,
// behind a fence, and goes out in a message of its own. What the wire has taken, copied by the kernel or
// sealed, no longer changes. A region is in use only around each non-blocking step of the wire: closing it
// never waits for a reader.
class Session {
 public:
  static constexpr int kStallMs = 30000;

  // `used_ns` is set to the time of each request.
  Session(int connection, int stop, std::unique_ptr<Wire> wire, std::shared_ptr<RegionTable> regions,
          std::atomic<int64_t>* used_ns)
      : connection_(connection),
        stop_(stop),
        wire_(std::move(wire)),
        regions_(std::move(regions)),
        used_ns_(used_ns) {}
  void serve();

 private:
  // Spans [first, end) of one region, `skip` bytes of the first being sent already, that go into one chunk.
  struct Chunk {
    std::shared_ptr<RegisteredRegion> region;  // null: unknown
    size_t first;
    uint64_t skip;
    size_t n_ended;
    uint64_t nbytes;
  };

  bool receive_request();
  bool are_spans_valid();
  bool respond();
  Chunk plan_chunk(size_t first, uint64_t skip);
  bool send_chunk(const Chunk& chunk, bool is_last);
  // Sends the chunk's bytes; zeros in their place, and `is_gone`, from where the region turned out closed.
  bool send_bytes(const Chunk& chunk, bool* is_gone);
  bool send_trailer(const Chunk& chunk, bool is_gone, bool is_last);

  bool receive_exactly(void* to, size_t nbytes, bool may_idle);
  bool send_exactly(const void* from, size_t nbytes, bool is_last);
  bool flush();
  bool wait_for(short events, int timeout_ms);

  const int connection_;
  const int stop_;
  const std::unique_ptr<Wire> wire_;
  const std::shared_ptr<RegionTable> regions_;
  std::atomic<int64_t>* const used_ns_;
  uint64_t request_id_ = 0;
  std::vector<SpanRequest> spans_;
  std::vector<uint8_t> trailer_;
};

}  // namespace p2pkv::tcp
