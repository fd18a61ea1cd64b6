// What the owners of transports within a host share: a Unix socket at which readers ask for regions, and
// which tells either side, by its end, that the other is gone.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "net/doorman.h"
#include "transports/registered.h"

namespace p2pkv {

// Names of the abstract namespace fit into handshakes padded with zeros.
constexpr size_t kSocketNameBytes = 40;

// Reader to owner: give me what I need to map this region.
struct RegionRequest {
  uint32_t magic;
  uint16_t version;
  uint16_t reserved;
  uint32_t region;
  uint32_t reserved2;
};
static_assert(sizeof(RegionRequest) == 16);

// Equal for processes that can reach each other's abstract sockets and pass the uid check; empty if this host
// can't be told from others, with the reason in `error`.
std::string domain_of_host(std::string_view transport, std::string* error);

// The reader's first step: connects to the owner's socket and shows the token, as far as that is possible
// without blocking. False once the owner is lost, or is somebody else.
bool greet_owner(const std::string& socket_name, const Hello& hello, UniqueFd* connection, bool* is_greeted);

// Readers keep their connection for as long as they read, so that either side sees the other's end at once.
// One thread answers all of them; a reader costs one descriptor, at most kMaxReaders are let in, and fewer
// under a low limit of descriptors. For a further one, the one that was let in first is hung up on: reads
// leave no trace here, and who still reads comes again.
class RegionServer {
 public:
  static constexpr size_t kMaxReaders = 1024;
  static constexpr size_t kMaxRegionsPerReader = 256;

  struct Rules {
    uint32_t hello_magic;
    uint32_t request_magic;
    const char* door_thread;
    const char* serving_thread;
    // Sends the reader what it needs, or that it gets nothing: then the region, of this id, is null. False if
    // it can't be sent at once.
    std::function<bool(int connection, uint32_t id, const RegisteredRegion* region)> answer;
  };

  // Null, with the reason in `error`.
  static std::unique_ptr<RegionServer> start(Rules rules, std::shared_ptr<RegionTable> regions,
                                             std::string* error);
  ~RegionServer() { close(); }
  void close();

  const std::string& socket_name() const { return socket_name_; }
  TokenTable& tokens() { return doorman_->tokens(); }
  // Hangs up on the readers of one grant.
  void drop_grant(uint64_t grant);
  // Hangs up on the readers that were given a region.
  void drop_region(uint32_t region);
  // Asks the readers that were given a region to let go of it, and waits until each has closed its
  // connection, as they do when they have, or have died. False at the deadline: they are hung up on.
  bool take_back(uint32_t region, const Deadline& deadline);

 private:
  struct Reader {
    UniqueFd connection;
    uint64_t grant;
    std::vector<uint32_t> regions;
    bool is_doomed = false;   // hung up on for another's sake; those before it are as well
    bool is_leaving = false;  // asked to let go: it is answered no more
    bool has(uint32_t region) const;
  };

  RegionServer(Rules rules, std::shared_ptr<RegionTable> regions)
      : rules_(std::move(rules)), regions_(std::move(regions)) {}
  void admit(UniqueFd connection, uint64_t grant);
  void run();
  bool answer(size_t reader);

  const Rules rules_;
  const pid_t pid_ = getpid();
  const std::shared_ptr<RegionTable> regions_;
  std::string socket_name_;
  std::unique_ptr<Doorman> doorman_;
  Wakeup wake_;
  NamedThread thread_;
  std::mutex
      mutex_;  // guards all below; `run` alone removes readers, so that indexes stay valid between its locks
  std::condition_variable left_;
  std::vector<Reader> readers_;
  bool is_closing_ = false;
};

}  // namespace p2pkv
