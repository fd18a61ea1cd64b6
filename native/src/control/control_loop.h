// The native thread behind a node's control socket: it answers probes, look-ups, publishes, retracts and
// handshakes without the interpreter, so that an engine that holds its GIL for seconds is neither suspected
// nor noticed.
//
// What needs Python (a peer's view, a handshake for a transport written in Python, the counters, pages that
// are handed over, what became of a page) is queued for it; a view is nevertheless answered at once with the
// one last set.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "control/zmq_socket.h"
#include "directory/server.h"
#include "directory/shard.h"
#include "net/acceptor.h"
#include "net/wire.h"
#include "page/namespace_epochs.h"
#include "pool/guests.h"

namespace p2pkv {

// One request that Python has to deal with.
struct ControlEvent {
  wire::Kind kind;
  std::string route;  // hand back to `reply`; empty when the peer has been answered already
  std::string body;
};

class ControlLoop {
 public:
  // What CONNECT asks for to get a channel to the shard; no transport is called so.
  static constexpr const char* kDirectory = "directory";

  struct Stats {
    uint64_t requests;
    uint64_t malformed;       // dropped or answered kMalformed
    uint64_t dropped_events;  // queued for Python and overtaken
    uint64_t queued_events;   // that wait for Python now
  };

  // `socket`: a bound ROUTER that no other thread uses until `stop` has returned. What peers tell of epochs
  // is raised in `epochs` before they are answered.
  ControlLoop(void* socket, std::shared_ptr<Shard> shard,
              std::shared_ptr<NamespaceEpochs> epochs = std::make_shared<NamespaceEpochs>());
  ~ControlLoop() { stop(); }

  void start() { thread_->start(); }
  // Idempotent. From its return on, `take` answers nothing and never blocks.
  void stop();

  // Answers as this node, in this boot, from now on; before it, and after `withdraw`, nothing is answered.
  void announce(uint64_t node_key, uint64_t boot);
  void withdraw();
  // What probes and exchanges are answered with from now on.
  void set_view(std::string view, uint64_t digest);
  // Who asks which routers there are is told this.
  void set_routers(std::string routers);
  // Handshakes for `name` are answered by `acceptor`, or queued for Python if that is null. `regions` goes to
  // the reader with the acceptor's half.
  void serve(const std::string& name, std::shared_ptr<Acceptor> acceptor, std::string regions);

  // Handshakes for kDirectory are answered by `server`, which answers as this node does.
  void serve_directory(std::shared_ptr<DirectoryServer> server);

  // Hands promotions to `promoter` from now on; null: there is no disk tier.
  void serve_promotions(std::shared_ptr<Promoter> promoter);

  // Has `guests` answer who follows this node, and hear what those take back that it follows; null: nobody.
  void serve_guests(std::shared_ptr<Guests> guests);
  // Has questions about this node's cache wait until then: it is a member, and asked, before it has one.
  void await_guests();

  // Binds one more address. 0 or an errno; blocks until the loop has done it.
  int bind(const std::string& address);
  // Gives an address up that was bound so; likewise.
  int unbind(const std::string& address);

  // The next event of `kind`; empty after `timeout` seconds, after `wake`, or when stopped.
  std::optional<ControlEvent> take(wire::Kind kind, double timeout);
  void wake(wire::Kind kind);
  void reply(const std::string& route, wire::ReplyStatus status, const std::string& body);

  Stats stats();

 private:
  struct Served {
    std::shared_ptr<Acceptor> acceptor;
    std::string regions;
  };
  // A TAKE_BACK that is answered once what it names has gone.
  struct TakingBack {
    std::string peer;
    wire::Header header;
    std::shared_ptr<Guests> guests;
    uint64_t ticket;
  };
  struct Queue {
    std::deque<ControlEvent> events;
    bool woken = false;
  };
  struct BindRequest {
    std::string address;
    bool is_bind;
    int result = -1;
    bool done = false;
  };

  void received(Frames frames);
  void answer(const std::string& peer, const wire::Header& header, wire::Reader body);
  void woken();
  void refuse(const std::string& peer, const wire::Header& header, wire::ReplyStatus status,
              std::string_view reason = {});
  void send(const std::string& peer, const wire::Header& header, std::string_view body);
  void probe(const std::string& peer, const wire::Header& header);
  void answer_directory(const std::string& peer, const wire::Header& header, wire::Reader body);
  void promote(const std::string& peer, const wire::Header& header, wire::Reader body);
  void connect(const std::string& peer, const wire::Header& header, wire::Reader body);
  void exchange(const std::string& peer, const wire::Header& header, wire::Reader body);
  void counters(const std::string& peer, const wire::Header& header, wire::Reader body);
  void routers(const std::string& peer, const wire::Header& header);
  void epochs(const std::string& peer, const wire::Header& header, wire::Reader body);
  void follow(const std::string& peer, const wire::Header& header, wire::Reader body);
  void take_back(const std::string& peer, const wire::Header& header, wire::Reader body);
  void go_on_taking_back();
  std::shared_ptr<Guests> guests();
  bool has_cache();  // or is about to
  void explain(const std::string& peer, const wire::Header& header, wire::Reader body);
  void queue(ControlEvent event);
  int rebind(BindRequest request);
  void send_from_anywhere(Frames frames);

  std::atomic<uint64_t> node_key_{0};
  std::atomic<uint64_t> boot_{0};  // 0: not announced
  const std::shared_ptr<Shard> shard_;
  const std::shared_ptr<NamespaceEpochs> epochs_;
  std::vector<TakingBack> taking_back_;  // of the loop's thread

  std::mutex mutex_;  // guards everything below it
  std::condition_variable changed_;
  bool stopped_ = false;
  std::string view_;
  std::string routers_;
  uint64_t digest_ = 0;
  std::map<std::string, Served> served_;
  std::shared_ptr<DirectoryServer> directory_;
  std::shared_ptr<Promoter> promoter_;
  std::shared_ptr<Guests> guests_;
  bool awaits_guests_ = false;
  std::map<wire::Kind, Queue> queues_;
  std::deque<Frames> outgoing_;
  std::deque<BindRequest*> binds_;
  std::atomic<uint64_t> requests_{0};
  std::atomic<uint64_t> malformed_{0};
  std::atomic<uint64_t> dropped_events_{0};

  std::unique_ptr<ZmqServerThread> thread_;
};

}  // namespace p2pkv
