// Where the body of an engine's answer ends (RFC 9112, 6): by its chunks, by its length, or with its
// connection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace p2pkv {

// Told the bytes behind an answer's head, however they are cut. Not thread-safe.
class AnswerBody {
 public:
  static constexpr int64_t kUntilClosed = -1;
  static constexpr int64_t kChunked = -2;
  static constexpr size_t kMaxFraming = 64 * 1024;  // bytes of chunk extensions and trailers in one answer

  // `length` in bytes, or one of the above.
  explicit AnswerBody(int64_t length);

  // Appends what is payload of `data` to `payload`. False if it is no HTTP; the answer is of no use then.
  bool feed(std::string_view data, std::string& payload);
  // The connection has ended.
  void close();

  bool is_complete() const { return state_ == State::kComplete; }
  // Something came behind its end, which nobody has asked for.
  bool is_spoilt() const { return is_spoilt_; }

 private:
  enum class State : uint8_t {
    kUntilClosed,
    kLength,
    kSize,       // of a chunk, in hexadecimal digits
    kExtension,  // behind it, to the end of the line
    kSizeEnd,    // the line feed
    kChunk,
    kChunkReturn,  // the line end behind a chunk
    kChunkEnd,
    kTrailer,  // at the beginning of a line
    kTrailerLine,
    kTrailerLineEnd,
    kTrailerEnd,
    kComplete,
    kFailed,
  };

  bool step(char byte);
  bool take_digit(char byte);
  void end_size();

  State state_;
  uint64_t n_left_ = 0;  // of the length or the chunk
  size_t n_digits_ = 0;
  size_t n_framing_ = 0;
  bool is_spoilt_ = false;
};

}  // namespace p2pkv
