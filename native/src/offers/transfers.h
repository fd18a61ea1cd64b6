// Transfers from one named node to another: offers of registered memory, and the pulls that take them.
//
// docs/transfers.md says what each part promises, docs/wire.md has the frames. Everything here works without
// the interpreter, except that a peer's first connection needs a handshake over the control plane.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "cuda/device.h"
#include "net/acceptor.h"
#include "net/listener.h"
#include "peers/peer_connections.h"
#include "transports/transport.h"

namespace p2pkv {

// What became of one row. The first seven are those of Status, as far as those go.
enum class RowStatus : uint8_t {
  kOk = 0,            // the receiver has exactly the offered bytes
  kPending = 1,       // not settled yet
  kOutOfRange = 2,    // not granted, or with another length
  kRejected = 3,      // withdrawn before it was proven
  kCanceled = 4,      // revoked, or a node is closing
  kPeerLost = 5,      // the other node or the way to it is gone
  kTimedOut = 6,      // the deadline or the lease's end came first
  kDuplicate = 7,     // the receiver has had this row already
  kDeviceFailed = 8,  // its copy from or to a device failed
  kGone = 9,          // it was offered to whoever asks, and that offer is over
};
using RowStatuses = std::vector<RowStatus>;

// A row in this process's memory; mirrors a row of the (n, 2) int64 array.
struct RowSpan {
  int64_t address;
  int64_t nbytes;
};

// Consecutive rows of a request.
struct Rows {
  std::string request;
  uint32_t first_row;
  std::vector<RowSpan> spans;
  // Of devices: nothing is copied from or to them before this stream has done what it was given until then.
  // As in cuda::Device::mark; none: the caller has waited.
  std::optional<uint64_t> stream = std::nullopt;
};

// A row that was over when the others of its offer were stowed: somebody had taken it.
constexpr RowSpan kNotStowed{};

// A copy of rows, in the buddy pool. Its room is free when this is gone and nobody is offered it any more.
struct Stowed {
  std::vector<RowSpan> spans;  // where each row lies, or kNotStowed
  std::vector<std::shared_ptr<const void>> rooms;
};

// Rows that peers may read. Destroying it leaves them offered until the lease ends.
class Offer {
 public:
  virtual ~Offer() = default;
  // Every row has its final status, and the memory is the caller's again.
  virtual bool done() = 0;
  // Blocks until `done` or the deadline.
  virtual void wait(const Deadline& deadline) = 0;
  // When it returns, no pull can succeed any more: those that did not are `reason`. Idempotent.
  virtual void withdraw(RowStatus reason) = 0;
  // Copies the rows that nobody has taken, and offers the copies from here on: when it returns them the
  // memory is the caller's again. A pull that is under way is rejected, and may be asked for once more. None:
  // there is no room for all, or some can't be copied, or the offer is over. Blocks for the copy. Not of what
  // is put.
  virtual std::optional<Stowed> stow() = 0;
  virtual RowStatuses statuses() = 0;
};

// Memory into which rows of a request are pulled.
class Grant {
 public:
  virtual ~Grant() = default;
  virtual bool done() = 0;
  // Blocks until `done` or the deadline; at the grant's own deadline it is revoked.
  virtual void wait(const Deadline& deadline) = 0;
  // When it returns nothing writes to the memory any more; pending rows are `reason`. Idempotent.
  virtual void revoke(RowStatus reason) = 0;
  virtual RowStatuses statuses() = 0;
};

class Transfers : public Acceptor {
 public:
  static constexpr size_t kMaxRows = 32768;       // of one message, which stays below a MiB; calls have any
  static constexpr size_t kMaxRequestName = 512;  // bytes

  struct Way {
    size_t number;  // with `Options::peers`, which may have others, that can't be pulled over
    std::string name;
    std::shared_ptr<Transport> transport;
  };
  struct Options {
    ListenAt listen;
    std::vector<Way> ways;                   // in order of preference
    std::shared_ptr<PeerConnections> peers;  // that pulls are made over; stays the caller's to close
    uint64_t buffer_nbytes = 0;
    uint64_t buddy_pool_nbytes = 0;
    uint64_t staging_nbytes = 64 << 20;  // page-locked, for each direction; made with the first device memory
    // How long rows that nobody granted or received are kept, and those whose offer is over remembered.
    double keep_unclaimed_s = 60.0;
    bool is_validating = true;  // false exists for the test that must see the harm
  };
  // A way that reads devices and can't have some device memory, or not let peers read it, and why.
  struct Refusal {
    std::string way;
    std::string reason;
  };
  // A number that grows or shows a state, under the name of its metric.
  using Reading = std::pair<const char*, uint64_t>;

  // Null, with the reason in `error`.
  static std::shared_ptr<Transfers> start(Options options, std::string* error);

  // Who this node is, from now on; peers that connect are told nothing before. 0: nobody yet.
  virtual void announce(uint64_t node_key, uint64_t boot) = 0;

  // A registration to make offers from and grants into: one region for each way that has it, by its number.
  // `descriptions` are empty for ways that can't read it for a peer. Returns its id.
  virtual uint32_t add_memory(uint64_t address, uint64_t nbytes, bool is_writable,
                              std::vector<std::shared_ptr<MemoryRegion>> regions,
                              std::vector<std::string> descriptions) = 0;
  // The same for memory of a device: ways that read devices have it, and over all others its rows go through
  // staging on both sides. 0, with the reason in `error`, if there is no staging to be had. `is_readable`:
  // rows in it may be offered.
  virtual uint32_t add_device_memory(uint64_t address, uint64_t nbytes, bool is_readable, bool is_writable,
                                     std::shared_ptr<cuda::Device> device, std::vector<Refusal>* refusals,
                                     std::string* error) = 0;
  // What has last gone wrong with a device; empty: nothing so far.
  virtual std::string device_failure() = 0;
  // Withdraws the offers and revokes the grants that lie in it; returns when nothing copies from or to it.
  virtual void remove_memory(uint32_t id) = 0;

  // What to send a peer with CONNECT, and what to do with the answer: blocks until the peer has spoken, at
  // most `timeout` seconds. False, with the reason in `error`.
  static std::string request();
  virtual bool connect(uint64_t node_key, uint64_t boot, std::string_view door, double timeout,
                       std::string* error) = 0;
  virtual bool is_connected(uint64_t node_key) = 0;
  // Hangs up on a boot of a node that is gone: what depends on it is lost. After so many seconds if it may
  // only seem to be gone, unless `keep` comes first.
  virtual void forget(PeerId peer, double after) = 0;
  virtual void keep(PeerId peer) = 0;

  // `to`: one node, which is told, or none: whoever asks for the request. Null, with the reason in `error`,
  // when rows overlap others that are offered; a row in no readable memory is -1 - its number in `bad_row`.
  virtual std::shared_ptr<Offer> offer(std::optional<uint64_t> to, Rows rows, const Deadline& lease,
                                       std::string* error) = 0;
  // `from`: the node to ask, or none: whoever puts. Null, with the reason in `error`.
  virtual std::shared_ptr<Grant> grant(std::optional<uint64_t> from, Rows rows, const Deadline& deadline,
                                       std::string* error) = 0;
  // Whether each span lies in one registered memory that is readable, or writable: the first that does not,
  // or -1.
  virtual int64_t find_unregistered(const std::vector<RowSpan>& spans, bool for_reading) = 0;

  virtual std::vector<Reading> readings() = 0;
  // Ends waits with kCanceled, hangs up on everybody and waits for the threads. Idempotent.
  virtual void close() = 0;
};

}  // namespace p2pkv
