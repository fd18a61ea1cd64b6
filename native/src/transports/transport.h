// The native transport interface: the same names as p2pkv/transports/base.py, which says what each promises.
//
// Threads: every method may be called from any thread. Only Transfer::wait and close() block on the peer.
// Nothing here touches Python or throws; failures are statuses or an error string.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "net/acceptor.h"
#include "page/page_taker.h"
#include "page/status.h"
#include "page/words.h"

namespace p2pkv {

// One piece of memory to read; bytes. Mirrors a row of the (n, 3) int64 array.
struct Span {
  int64_t local;   // offset in the local region
  int64_t remote;  // offset in the remote region
  int64_t length;
};

// Local memory known to a transport. `base` stays valid until close() has returned.
class MemoryRegion : public std::enable_shared_from_this<MemoryRegion> {
 public:
  virtual ~MemoryRegion() = default;
  virtual uint8_t* base() const = 0;
  virtual uint64_t nbytes() const = 0;
  // What a peer hands to Endpoint::attach; empty if not readable.
  virtual std::string describe() const = 0;
  // From its return on, nothing reads this memory for a peer. Idempotent.
  virtual void close() = 0;
};

class RemoteRegion : public std::enable_shared_from_this<RemoteRegion> {
 public:
  virtual ~RemoteRegion() = default;
  virtual uint64_t nbytes() const = 0;
};

class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  virtual ~Transfer() = default;
  // Makes what progress it can without blocking; true once every span has settled.
  virtual bool done() = 0;
  // Makes progress for at most `timeout` seconds; true once every span has settled. What is pending goes on.
  virtual bool advance(double timeout) = 0;
  // Blocks at most `timeout` seconds; afterwards every span has settled and nothing touches local memory.
  virtual void wait(double timeout) = 0;
  // Valid once settled.
  virtual const std::vector<Status>& statuses() const = 0;
};

// Spans that are taken where they lie in the peer's memory, instead of being copied into local memory.
struct Takes {
  static constexpr size_t kCopied = SIZE_MAX;

  std::vector<size_t> tags;  // by span; kCopied: it is not taken. Empty: none is
  // Takes the bytes of the span with this tag, which may change meanwhile, by ordinary loads. Called once for
  // a span, by the thread that drives the transfer or a helper of its copies. What it makes counts only if
  // the span becomes kOk: its word is loaded afterwards.
  std::function<void(size_t tag, const uint8_t* from)> take;
  // If it is there, `take` only notes where a span lies, and its bytes are taken by this, which is called
  // before the words of these spans are loaded. When it returns nobody reads there any more.
  std::function<void(const MappedBytes& memory)> land;

  bool is_taken(size_t span) const { return !tags.empty() && tags[span] != kCopied; }
};

// What an endpoint is, beside the rest, if it maps its peer's memory.
class Lender {
 public:
  virtual ~Lender() = default;
  // As BoundEndpoint::read, but for the spans that are taken. These are looked at in `local` as all are, and
  // it stays open while they are taken, so that `take` may write to it.
  virtual std::shared_ptr<Transfer> lend(std::shared_ptr<MemoryRegion> local,
                                         std::shared_ptr<RemoteRegion> remote, std::vector<Span> spans,
                                         std::vector<Word> words, Takes takes) = 0;
  // Whether the peer's memory is mapped already: then spans are taken without anything of the peer.
  virtual bool maps(const RemoteRegion& remote) = 0;
};

// What a batch needs of an endpoint, once its handshake is over. One transfer at a time.
class BoundEndpoint {
 public:
  virtual ~BoundEndpoint() = default;
  // `words` is empty or holds one word per span. Never null: what cannot be posted has settled already.
  virtual std::shared_ptr<Transfer> read(std::shared_ptr<MemoryRegion> local,
                                         std::shared_ptr<RemoteRegion> remote, std::vector<Span> spans,
                                         std::vector<Word> words) = 0;
  // Null if it doesn't lend.
  virtual Lender* lender() { return nullptr; }
  // Whether a new one would be better: it goes on working, but not over every way that there is.
  virtual bool is_worn() { return false; }
  // Settles what is pending as kCanceled; when it returns, nothing writes to local memory. Idempotent.
  virtual void close() = 0;
};

class Endpoint : public BoundEndpoint, public std::enable_shared_from_this<Endpoint> {
 public:
  // Empty if there is nothing to describe; failure() then says why, or nothing if the endpoint is closed.
  virtual std::string describe() = 0;
  virtual std::string failure() { return {}; }
  // False, with the reason in `error`, when the blob is not a peer's half of this transport.
  virtual bool bind(std::string_view remote, std::string* error) = 0;
  virtual std::shared_ptr<RemoteRegion> attach(std::string_view region, std::string* error) = 0;
};

// What became of reads over a rail, of all peers together.
struct RailTotals {
  uint64_t n_bytes = 0;          // that came over it
  uint64_t n_broken = 0;         // connections that failed
  uint64_t n_silent = 0;         // connections given up because another rail was heard and they were not
  uint64_t n_late = 0;           // connections given up because another rail would bring the rest much sooner
  uint64_t n_retried_bytes = 0;  // asked for once more, over another rail
};

class Transport : public Acceptor, public std::enable_shared_from_this<Transport> {
 public:
  virtual std::string domain() const = 0;
  // Whether it registers memory of CUDA devices, and reads from one device's into another's. It does not read
  // from a device into host memory, or from there to a device.
  virtual bool reads_devices() const { return false; }
  // Null, with the reason in `error`. `fd` is the memfd behind the memory, or -1.
  virtual std::shared_ptr<MemoryRegion> register_memory(uint8_t* base, uint64_t nbytes, int fd, bool readable,
                                                        std::string* error) = 0;
  virtual std::shared_ptr<Endpoint> open() = 0;
  // The owner's half of a handshake in one call: opens an endpoint, binds it to the reader's half and returns
  // its own. The transport owns that endpoint until the peer is gone. The control loop calls this, so that a
  // new reader is let in without the interpreter.
  std::string accept(std::string_view remote, std::string* error) override = 0;
  // Of each rail, by its number: what its failures and its bytes were. Empty where no endpoint has had any.
  virtual std::vector<RailTotals> rail_totals() const { return {}; }
  // Records that came over encrypted connections and were not what the other end had sealed. Each ended its
  // connection.
  virtual uint64_t n_forged() const { return 0; }
  virtual void close() = 0;
};

}  // namespace p2pkv
