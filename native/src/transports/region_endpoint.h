// What the readers of transports within a host share, as region_server.h is what their owners do: a
// connection to the owner's Unix socket, over which regions are asked for, and whose end tells that the owner
// is gone.
#pragma once

#include <unistd.h>

#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "transports/batch_endpoint.h"
#include "transports/region_server.h"

namespace p2pkv {

// Where an owner is asked, and what is shown there; as both halves of a handshake have it.
struct OwnerDoor {
  char socket_name[kSocketNameBytes];  // in the abstract namespace, padded with zeros
  Token token;
};
static_assert(sizeof(OwnerDoor) == 72);

// Mints a token for whoever is handed this door.
OwnerDoor make_door(RegionServer& server, uint64_t grant);

// The reader's end of a connection. Closed for both sides when it goes, also where a forked child has it too.
class OwnerSocket {
 public:
  explicit OwnerSocket(UniqueFd fd) : fd_(std::move(fd)) {}
  ~OwnerSocket();
  int fd() const { return fd_.get(); }
  // Whether the owner is gone, or wants to have back what it has handed over.
  bool has_hung_up() const;

 private:
  UniqueFd fd_;
  const pid_t pid_ = getpid();
};

// A peer's region. Its owner's reply says how it is reached; all but the sizes is guarded by the endpoint's
// mutex.
class AskedRegion : public AttachedRegion {
 public:
  using AttachedRegion::AttachedRegion;
  // Gives back what the owner has handed over. No batch uses it any more.
  virtual void let_go() = 0;

  bool is_answered = false;
  bool is_refused = false;  // the owner has no such region, or no more
};

// The connection is made and the regions are asked for without blocking, in bind() and attach(); the replies
// are taken when the first read needs them.
class RegionEndpoint : public BatchEndpoint {
 public:
  struct Rules {
    uint32_t hello_magic;
    uint32_t region_magic;
    uint32_t request_magic;
  };

  std::shared_ptr<RemoteRegion> attach(std::string_view region, std::string* error) final;

  enum class Progress { kReady, kWaiting, kRefused, kLost };
  // Connects, asks and takes replies as far as possible without blocking; whether the region can be read by
  // now.
  Progress poll(AskedRegion& region);
  // Blocks until something may have changed. Only for the thread that drives the batch.
  void wait_for_owner(const Deadline& deadline);

 protected:
  RegionEndpoint(RegionServer& server, Rules rules)
      : server_(server), rules_(rules), grant_(server.tokens().new_grant()) {}

  // For a subclass's half of the handshake; what it takes of the peer's.
  OwnerDoor own_door() { return make_door(server_, grant_); }
  void go_to(const OwnerDoor& door);

  // All called with mutex_ held; none blocks.
  virtual std::shared_ptr<AskedRegion> make_region(uint32_t id, uint64_t nbytes) = 0;
  // The connection has been made, and is the subclass's to keep.
  virtual void keep(std::shared_ptr<OwnerSocket> connection) = 0;
  // Null where there is none, or none any more.
  virtual std::shared_ptr<OwnerSocket> connection() = 0;
  // Takes what has come of the reply to what was asked first. False for an owner that is lost, or says what
  // can't be.
  virtual bool take_reply(AskedRegion& region, int connection, bool* is_complete) = 0;

  void release() override;

  const std::string& owner_name() const { return owner_name_; }

 private:
  // With mutex_ held; false once the owner is lost.
  bool advance();
  bool take_replies(int connection);

  RegionServer& server_;  // of the transport, which the subclass keeps alive
  const Rules rules_;
  const uint64_t grant_;
  OwnerDoor owner_{};
  std::string owner_name_;
  bool is_greeted_ = false;
  bool is_lost_ = false;                                // a reply could not be taken, and does not come again
  UniqueFd connecting_;                                 // until it is greeted
  std::vector<std::weak_ptr<AskedRegion>> regions_;     // all ever attached
  std::deque<std::shared_ptr<AskedRegion>> to_ask_;     // not asked for yet
  std::deque<std::shared_ptr<AskedRegion>> to_answer_;  // asked for, in order
};

}  // namespace p2pkv
