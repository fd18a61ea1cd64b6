// The links of a node: lets peers in, connects to them, and receives for all on one thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread.h"
#include "net/acceptor.h"
#include "net/sealed_door.h"
#include "offers/link.h"

namespace p2pkv::offers {

class LinkServer : public Acceptor {
 public:
  static constexpr size_t kMaxLinks = 4096;  // further ones are hung up on

  // All called on the server's thread, none of which may block.
  struct Listener {
    // A message that came over a link. False: no node of ours would have sent it; the link is cut.
    std::function<bool(const std::shared_ptr<Link>&, const wire::Header&, wire::Reader)> heard;
    // Nothing comes or goes over this link any more.
    std::function<void(const std::shared_ptr<Link>&)> lost;
    // Every kTickMs.
    std::function<void()> tick;
  };

  explicit LinkServer(Listener listener);
  ~LinkServer() override { close(); }
  bool start(const ListenAt& at, std::string* error);
  // Hangs up on everybody, tells the listener of each, and waits for the thread. Idempotent.
  void close();

  // The owner's half of a handshake that came over the control plane.
  std::string accept(std::string_view remote, std::string* error) override;

  // Connects to the node whose door this is, and introduces this one. Blocks until it has answered.
  std::shared_ptr<Link> connect(std::string_view door, const IntroduceRecord& own, PeerId peer,
                                const Deadline& deadline, std::string* error);
  // A link to this node, null if there is none.
  std::shared_ptr<Link> find(uint64_t node_key);
  size_t n_links();
  // Those whose nodes are known.
  std::vector<std::shared_ptr<Link>> all();
  // Hangs up on this boot of a node, after so many seconds unless it is kept before: over the links that it
  // has now.
  void hang_up_after(PeerId peer, double seconds);
  void keep(PeerId peer);

 private:
  void run();
  std::shared_ptr<Link> add(std::unique_ptr<SealedStream> stream, PeerId peer);
  void serve(const std::shared_ptr<Link>& link, uint32_t events);
  bool hear(const std::shared_ptr<Link>& link, const std::string& message);
  void hang_up(const std::shared_ptr<Link>& link);
  void hang_up_on_doomed();
  void watch(int fd, uint64_t id, int operation, uint32_t events) const;
  std::shared_ptr<Link> at(uint64_t id);

  const Listener listener_;
  const pid_t pid_ = getpid();
  const UniqueFd epoll_;
  Wakeup stop_;
  SealedDoor door_;
  NamedThread thread_;
  std::mutex closing_;  // held by the one close() that does the work
  std::mutex mutex_;    // guards all below
  std::map<uint64_t, std::shared_ptr<Link>> links_;
  std::map<uint64_t, Deadline> doomed_;  // links by id, and when they are cut
  uint64_t next_id_;
  bool is_closing_ = false;
};

}  // namespace p2pkv::offers
