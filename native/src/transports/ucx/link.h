// The reader's connections: one worker for all endpoints of a transport, and what its thread shares with
// them.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "address.h"
#include "frames.h"
#include "worker.h"

namespace p2pkv::ucx {

// A request of a batch, ready to be sent.
struct Ask {
  AskFrame frame;
  std::vector<SpanRequest> spans;
};

// A batch as the worker's thread sees it. Every method is called by that thread, with the link's mutex held.
class Arrivals {
 public:
  // Takes a piece of a request's bytes. False if no owner of ours could have sent it.
  virtual bool take_bytes(const BytesFrame& frame, std::string_view bytes) = 0;
  virtual bool take_end(const EndFrame& frame, std::string_view words) = 0;
  // The next request to send, if there is one and the owner may be asked it now.
  virtual bool next_ask(Ask* ask) = 0;
  virtual bool is_complete() const = 0;

 protected:
  ~Arrivals() = default;
};

// What an endpoint and the worker's thread share. The thread holds the mutex while it writes to local memory:
// once `arrivals` is null, nothing does.
struct Link {
  explicit Link(uint64_t id) : id(id) {}
  const uint64_t id;
  std::mutex mutex;  // guards all below
  std::condition_variable changed;
  Arrivals* arrivals = nullptr;
  bool is_lost = false;
};

class Links {
 public:
  // `local`: where connections come from.
  static std::unique_ptr<Links> start(const Address& local, const Settings& settings, std::string* error);
  ~Links() { close(); }
  // Loses every link.
  void close() { worker_->close(); }

  std::shared_ptr<Link> make();
  // None of these blocks; what goes wrong shows in `is_lost`.
  void connect(const std::shared_ptr<Link>& link, const Address& owner, const Token& token);
  // Asks for what the link's arrivals want.
  void ask(const std::shared_ptr<Link>& link);
  void disconnect(const std::shared_ptr<Link>& link);

 private:
  struct Line {
    std::shared_ptr<Link> link;
    ucp_ep_h endpoint;
  };

  Links() = default;
  static void failed(void* links, ucp_ep_h endpoint, ucs_status_t status);
  void open(const std::shared_ptr<Link>& link, const Address& owner, const Token& token);
  void send_asks(Line& line, Arrivals& arrivals);
  template <typename Frame, typename Take>
  void arrived(std::string_view bytes, Take take);
  bool drop_failed();
  void drop(uint64_t id);

  Address local_;
  std::unique_ptr<Worker> worker_;
  // All below: the worker's thread only.
  std::unordered_map<uint64_t, Line> lines_;
  std::vector<uint64_t> failed_;  // found out within UCX's callbacks, where they can't be closed
};

}  // namespace p2pkv::ucx
