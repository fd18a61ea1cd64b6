// One reader's connection, as the owner serves it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/fd.h"
#include "transports/registered.h"
#include "transports/tcp/frames.h"

namespace p2pkv::tcp {

// Serves requests until the reader hangs up, misbehaves, makes no progress for kStallMs, or `stop` is
// readable.
//
// What makes a word come after its bytes: it is loaded once the kernel has taken the last byte of the chunk,
// behind a fence, and goes out in a message of its own. The bytes are copied by sendmsg (no zero-copy), so
// what the kernel has taken no longer changes. A region is in use only around each non-blocking system call:
// closing it never waits for a reader.
class Session {
 public:
  static constexpr int kStallMs = 30000;

  // `used_ns` is set to the time of each request.
  Session(int connection, int stop, std::shared_ptr<RegionTable> regions, std::atomic<int64_t>* used_ns)
      : connection_(connection), stop_(stop), regions_(std::move(regions)), used_ns_(used_ns) {}
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
  bool send_trailer(const Chunk& chunk, bool is_gone, int flags);

  bool receive_exactly(void* to, size_t nbytes, bool may_idle);
  bool send_exactly(const void* from, size_t nbytes, int flags);
  bool wait_for(short events, int timeout_ms);

  const int connection_;
  const int stop_;
  const std::shared_ptr<RegionTable> regions_;
  std::atomic<int64_t>* const used_ns_;
  uint64_t request_id_ = 0;
  std::vector<SpanRequest> spans_;
  std::vector<uint8_t> trailer_;
};

}  // namespace p2pkv::tcp
