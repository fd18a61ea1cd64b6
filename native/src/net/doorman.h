// The door of a listening transport: lets in peers that show a live token, and nobody else.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "base/thread.h"
#include "net/frames.h"
#include "net/tokens.h"

namespace p2pkv {

// One thread accepts connections and reads their Hello, however slowly each comes, without any of them
// holding up the others. At most kMaxVisitors wait at a time at all doors of the process together, and fewer
// under a low limit of descriptors; then the door's oldest is dropped. A door has kOwnVisitors whatever the
// others have. Each waits for at most kPatience.
class Doorman {
 public:
  static constexpr size_t kMaxVisitors = 128;
  static constexpr size_t kOwnVisitors = 8;
  static constexpr double kPatience = 5.0;

  struct Rules {
    uint32_t magic;       // of the Hello
    bool same_user_only;  // Unix sockets: the peer's uid must be ours
    const char* thread_name;
  };
  // This is what is known of a peer that was let in.
  struct Admitted {
    uint64_t grant;
    Token secret;  // that its token was minted with
    Hello hello;   // as it came
  };
  // Called on the doorman's thread with the connection of an admitted peer.
  using Admit = std::function<void(UniqueFd connection, const Admitted& peer)>;

  // `listeners`: one for each address at which it is knocked; all are one door.
  Doorman(std::vector<UniqueFd> listeners, Rules rules, Admit admit);
  Doorman(UniqueFd listener, Rules rules, Admit admit);
  ~Doorman() { close(); }
  bool start(std::string* error);
  // Returns when the thread has ended; connections that were waiting are dropped.
  void close();

  TokenTable& tokens() { return tokens_; }

 private:
  struct Visitor {
    UniqueFd connection;
    Deadline deadline;
    size_t n_received;
    Hello hello;
  };
  enum class Verdict { kWaiting, kAdmitted, kDropped };

  void run();
  void accept_all(int listener);
  void drop_oldest();
  void count();
  Verdict hear(Visitor& visitor, Admitted* peer);
  int poll_ms() const;

  const pid_t pid_ = getpid();
  std::vector<UniqueFd> listeners_;
  const Rules rules_;
  const Admit admit_;
  TokenTable tokens_;
  Wakeup stop_;
  NamedThread thread_;
  // Of the thread alone.
  std::vector<Visitor> visitors_;  // oldest first
  size_t n_counted_ = 0;           // of them, among those of all doors
  bool is_out_of_fds_ = false;
};

}  // namespace p2pkv
