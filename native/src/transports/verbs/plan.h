// How one lane reads its share of a batch: which RDMA READs, in which order. Knows nothing of devices.
//
// The share is cut into chunks. A chunk is the READs of its spans' bytes, then those of their generation
// words, the first of which is fenced: the device starts it, and with it all behind it, only when every byte
// before it has arrived. So a word is loaded after the last byte of the spans it vouches for.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "transports/transport.h"

namespace p2pkv::verbs {

// Bounds how long words stay unread, and so how often an overwritten page is noticed late; the fence costs
// one round trip a chunk, which is less than 2 % of it at 25 GB/s.
constexpr uint64_t kChunkBytes = 8 << 20;
// So that a chunk of tiny pages is not longer on its way than one of large pages.
constexpr uint32_t kChunkSpans = 4096;
constexpr uint32_t kChunkWords = 512;
// Words arrive in a buffer of the lane. While one chunk's are looked at, the next two are on their way.
constexpr uint32_t kChunksInFlight = 3;
constexpr uint32_t kChunkWordBytes = 16 << 10;
// Words closer to each other than this are one READ: a table has one for every block of 4 KiB, and 512 bytes
// more cost less than another request.
constexpr uint64_t kWordGap = 512;

struct Piece {
  uint64_t at;  // offset in local memory, or in the buffer for words
  uint32_t nbytes;
};

struct PlannedRead {
  uint64_t remote;  // offset in the remote region
  uint32_t nbytes;
  uint32_t first_piece;
  uint32_t n_pieces;
  bool is_words;
  bool is_fenced;
  bool ends_chunk;
};

class ReadPlan {
 public:
  struct Limits {
    uint32_t pieces;   // of one read
    uint64_t message;  // bytes of one read
  };
  static constexpr uint32_t kNoSlot = UINT32_MAX;
  // A span of a chunk, and where in the buffer its word arrives.
  struct Expected {
    uint32_t span;
    uint32_t slot;
  };
  struct Chunk {
    uint32_t first_expected;
    uint32_t n_expected;
    uint32_t end_read;  // its reads are those before, up to the chunk before
  };

  // Both must outlive the plan; `words` is empty or has one for each span.
  ReadPlan(const std::vector<Span>& spans, const std::vector<Word>& words, const Limits& limits)
      : spans_(spans), words_(words), limits_(limits) {}

  // Adds the spans with these numbers, in chunks of their own.
  void append(const std::vector<uint32_t>& share);

  const std::vector<PlannedRead>& reads() const { return reads_; }
  const std::vector<Piece>& pieces() const { return pieces_; }
  const std::vector<Expected>& expected() const { return expected_; }
  const std::vector<Chunk>& chunks() const { return chunks_; }

 private:
  bool is_validated(uint32_t span) const { return !words_.empty() && words_[span].offset != kNoWord; }
  void add_bytes(const Span& span);
  void add_words();
  void end_chunk();
  uint32_t chunk_begin() const { return chunks_.empty() ? 0 : chunks_.back().end_read; }

  const std::vector<Span>& spans_;
  const std::vector<Word>& words_;
  const Limits limits_;
  std::vector<PlannedRead> reads_;
  std::vector<Piece> pieces_;
  std::vector<Expected> expected_;
  std::vector<Chunk> chunks_;
  uint32_t first_expected_ = 0;                           // of the chunk being built
  std::vector<std::pair<uint64_t, uint32_t>> by_offset_;  // its words' offsets and whose they are
};

}  // namespace p2pkv::verbs
