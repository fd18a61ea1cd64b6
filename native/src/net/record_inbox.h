// It takes what comes over an encrypted connection, record by record.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "net/record_cipher.h"

namespace p2pkv {

// Used by one thread at a time; nothing here blocks.
class RecordInbox {
 public:
  enum class Progress { kRecord, kMoved, kBlocked, kLost };

  // One system call at most, and none if a record is here already. kRecord: also when what is here says that
  // it holds nothing, or more than `most` bytes, which the other side would not send; then nothing opens it.
  // kMoved: something has come, but no whole record; kLost: the connection has ended.
  Progress receive(int connection, size_t most);
  // The first record, after kRecord, until drop().
  uint8_t* record() const { return bytes_.get() + begin_; }
  void drop();
  bool has_record(size_t most) const;
  bool is_empty() const { return begin_ == end_; }

 private:
  // A batch's answer comes in few system calls, and lies in a core's caches until it is opened.
  static constexpr size_t kRoom = 256 << 10;

  size_t n_here() const { return end_ - begin_; }

  std::unique_ptr<uint8_t[]> bytes_;  // from the first receive() on
  size_t begin_ = 0, end_ = 0;
};

}  // namespace p2pkv
