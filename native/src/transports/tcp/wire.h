// How bytes go over a connection of the tcp transport: as they are, or encrypted.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "net/record_cipher.h"

namespace p2pkv::tcp {

// One end of a connection, behind its Hello. Used by one thread at a time, but for holds_more(); nothing here
// blocks.
class Wire {
 public:
  enum class Progress { kMoved, kBlocked, kLost };

  virtual ~Wire() = default;
  // Takes what has come into the pieces, in order, by one system call at most. kMoved: `n_bytes` of them, or
  // none yet of what has come. The other end sends no two things at once of which one may be more than there
  // is room for here.
  virtual Progress receive(int connection, const iovec* pieces, size_t n_pieces, size_t* n_bytes) = 0;
  // Takes bytes from the pieces, which may change meanwhile: what was taken is read no more. `is_last`:
  // nothing follows soon.
  virtual Progress send(int connection, const iovec* pieces, size_t n_pieces, bool is_last,
                        size_t* n_bytes) = 0;
  // Sends what was taken. kMoved: all of it is sent.
  virtual Progress flush(int connection) = 0;
  // Appends the bytes as they are to be sent. False: nothing may be sent any more.
  virtual bool append(const void* bytes, size_t nbytes, std::vector<uint8_t>* to) = 0;
  // Whether receive() would have something without asking the connection. Any thread may ask.
  virtual bool holds_more() const = 0;
};

// How the ends of one transport encrypt.
class Sealing {
 public:
  explicit Sealing(uint64_t rekey_after) : rekey_after_(rekey_after) {}

  std::unique_ptr<Wire> wire(const CipherKey& session, const Hello& hello, Sender self);
  // Records that were not what the other end had sealed; each ended its connection.
  uint64_t n_forged() const { return n_forged_.load(std::memory_order_relaxed); }

 private:
  const uint64_t rekey_after_;
  std::atomic<uint64_t> n_forged_{0};
};

std::unique_ptr<Wire> plain_wire();

}  // namespace p2pkv::tcp
