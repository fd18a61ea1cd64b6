#include "relay/answer_body.h"

#include <algorithm>

namespace p2pkv {
namespace {

constexpr size_t kMaxDigits = 15;  // of a chunk's size: 64 bits can't wrap

int digit_of(char byte) {
  if (byte >= '0' && byte <= '9') return byte - '0';
  const char lower = static_cast<char>(byte | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

}  // namespace

AnswerBody::AnswerBody(int64_t length)
    : state_(length == kChunked       ? State::kSize
             : length == kUntilClosed ? State::kUntilClosed
             : length == 0            ? State::kComplete
                                      : State::kLength),
      n_left_(length > 0 ? static_cast<uint64_t>(length) : 0) {}

bool AnswerBody::feed(std::string_view data, std::string& payload) {
  while (!data.empty()) {
    switch (state_) {
      case State::kUntilClosed:
        payload.append(data);
        return true;
      case State::kLength:
      case State::kChunk: {
        const size_t n = static_cast<size_t>(std::min<uint64_t>(n_left_, data.size()));
        payload.append(data.substr(0, n));
        data.remove_prefix(n);
        n_left_ -= n;
        if (n_left_ == 0) state_ = state_ == State::kChunk ? State::kChunkReturn : State::kComplete;
        break;
      }
      case State::kComplete:
        is_spoilt_ = true;
        return true;
      default:
        if (!step(data.front())) {
          state_ = State::kFailed;
          return false;
        }
        data.remove_prefix(1);
    }
  }
  return state_ != State::kFailed;
}

void AnswerBody::close() {
  if (state_ == State::kUntilClosed) state_ = State::kComplete;
}

// Takes a byte that is framing.
bool AnswerBody::step(char byte) {
  switch (state_) {
    case State::kSize:
      return take_digit(byte);
    case State::kExtension:
      if (byte == '\r') state_ = State::kSizeEnd;
      return byte != '\n' && ++n_framing_ <= kMaxFraming;
    case State::kSizeEnd:
      end_size();
      return byte == '\n';
    case State::kChunkReturn:
      state_ = State::kChunkEnd;
      return byte == '\r';
    case State::kChunkEnd:
      state_ = State::kSize;
      return byte == '\n';
    case State::kTrailer:
      state_ = byte == '\r' ? State::kTrailerEnd : State::kTrailerLine;
      return byte != '\n' && ++n_framing_ <= kMaxFraming;
    case State::kTrailerLine:
      if (byte == '\r') state_ = State::kTrailerLineEnd;
      return byte != '\n' && ++n_framing_ <= kMaxFraming;
    case State::kTrailerLineEnd:
      state_ = State::kTrailer;
      return byte == '\n';
    case State::kTrailerEnd:
      state_ = State::kComplete;
      return byte == '\n';
    default:
      return false;
  }
}

bool AnswerBody::take_digit(char byte) {
  if (const int digit = digit_of(byte); digit >= 0) {
    n_left_ = n_left_ << 4 | static_cast<uint64_t>(digit);
    return ++n_digits_ <= kMaxDigits;
  }
  if (n_digits_ == 0) return false;
  if (byte == '\r') {
    state_ = State::kSizeEnd;
    return true;
  }
  state_ = State::kExtension;
  return byte == ';' || byte == ' ' || byte == '\t';
}

void AnswerBody::end_size() {
  state_ = n_left_ > 0 ? State::kChunk : State::kTrailer;
  n_digits_ = 0;
}

}  // namespace p2pkv
