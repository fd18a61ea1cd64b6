// The owner's side of the shm transport: hands memfds to readers and tells them, by hanging up, that it is
// gone.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "net/doorman.h"
#include "transports/registered.h"

namespace p2pkv::shm {

// Readers keep their connection for as long as they read, so that either side sees the other's end at once.
// One thread answers all of them; a reader costs one descriptor, at most kMaxReaders are let in, and fewer
// under a low limit of descriptors. For a further one, the one that was let in first is hung up on: reads
// leave no trace here, and who still reads comes again.
class Server {
 public:
  static constexpr size_t kMaxReaders = 1024;
  static constexpr size_t kMaxRegionsPerReader = 256;

  static std::unique_ptr<Server> start(std::shared_ptr<RegionTable> regions, std::string* error);
  ~Server() { close(); }
  void close();

  const std::string& socket_name() const { return socket_name_; }
  TokenTable& tokens() { return doorman_->tokens(); }
  // Hangs up on the readers of one grant.
  void drop_grant(uint64_t grant);
  // Hangs up on the readers that were given a region.
  void drop_region(uint32_t region);

 private:
  struct Reader {
    UniqueFd connection;
    uint64_t grant;
    std::vector<uint32_t> regions;
    bool is_doomed;  // hung up on for another's sake; those before it are as well
  };

  explicit Server(std::shared_ptr<RegionTable> regions) : regions_(std::move(regions)) {}
  void admit(UniqueFd connection, uint64_t grant);
  void run();
  bool answer(size_t reader);

  const pid_t pid_ = getpid();
  const std::shared_ptr<RegionTable> regions_;
  std::string socket_name_;
  std::unique_ptr<Doorman> doorman_;
  Wakeup wake_;
  NamedThread thread_;
  std::mutex
      mutex_;  // guards all below; `run` alone removes readers, so that indexes stay valid between its locks
  std::vector<Reader> readers_;
  bool is_closing_ = false;
};

}  // namespace p2pkv::shm
