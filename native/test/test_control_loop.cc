// The thread behind the control socket: what it answers, what it survives, and how it stops.
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/checksum.h"
#include "check.h"
#include "control/control_loop.h"
#include "keys.h"
#include "seed.h"
#include "transports/transport.h"
#include "zmq_library.h"

namespace {

using p2pkv::ControlLoop;
using p2pkv::Key;
using p2pkv::Location;
using p2pkv::Shard;
using p2pkv::test::key_of;
using p2pkv::test::ZmqContext;
using p2pkv::test::ZmqSocket;
using p2pkv::wire::Header;
using p2pkv::wire::Kind;
using p2pkv::wire::ReplyStatus;

constexpr uint64_t kNode = 77;
constexpr uint64_t kBoot = 5;

// Takes any half and answers it backwards; refuses "no".
class Mirror final : public p2pkv::Transport {
 public:
  std::string domain() const override { return "mirror"; }
  std::shared_ptr<p2pkv::MemoryRegion> register_memory(uint8_t*, uint64_t, int, bool, std::string*) override {
    return nullptr;
  }
  std::shared_ptr<p2pkv::Endpoint> open() override { return nullptr; }
  std::string accept(std::string_view remote, std::string* error) override {
    if (remote == "no") *error = "not you";
    return remote == "no" ? "" : std::string(remote.rbegin(), remote.rend()) + "!";
  }
  void close() override {}
};

struct Reply {
  Header header;
  std::string body;
};

class Client {
 public:
  Client(const ZmqContext& context, const std::string& address) : socket_(context, p2pkv::test::kDealer) {
    CHECK(socket_.connect(address));
  }

  static std::string pack(Kind kind, uint64_t id, uint32_t count, std::string_view body, uint64_t boot = 0) {
    const Header header{
        p2pkv::wire::kMagic, p2pkv::wire::kVersion, static_cast<uint16_t>(kind), id, boot, count, 0};
    std::string message;
    p2pkv::wire::append(message, header);
    return message.append(body);
  }

  void send(const std::string& message) { socket_.send(message); }
  void send(const std::vector<std::string>& frames) { socket_.send(frames); }

  std::optional<Reply> receive(long timeout_ms = 10'000) {
    const auto message = socket_.receive(timeout_ms);
    if (!message || message->size() < sizeof(Header)) return std::nullopt;
    p2pkv::wire::Reader reader(*message);
    const Header header = *reader.value<Header>();
    return Reply{header, std::string(reader.rest())};
  }

  // Sends a request and skips answers to earlier ones.
  std::optional<Reply> ask(Kind kind, uint32_t count, std::string_view body, uint64_t boot = 0) {
    const uint64_t id = ++last_id_;
    send(pack(kind, id, count, body, boot));
    for (auto reply = receive(); reply; reply = receive()) {
      if (reply->header.request_id == id) return reply;
    }
    return std::nullopt;
  }

 private:
  ZmqSocket socket_;
  uint64_t last_id_ = uint64_t{1} << 32;
};

ReplyStatus status_of(const std::optional<Reply>& reply) {
  CHECK(reply.has_value());
  return reply ? static_cast<ReplyStatus>(reply->header.status) : static_cast<ReplyStatus>(~0u);
}

// A loop on a socket of its own. Members are destroyed in the order that production keeps: loop, socket,
// context.
struct Served {
  ZmqContext context;
  ZmqSocket socket{context, p2pkv::test::kRouter};
  std::string address;
  std::shared_ptr<Shard> shard = std::make_shared<Shard>(1 << 12);
  ControlLoop loop{socket.native(), shard};

  explicit Served(const char* name) : address(std::string("inproc://") + name) {
    CHECK(socket.bind(address));
    const uint64_t owner = 1;
    shard->set_view(&owner, &kBoot, 1);
    loop.announce(kNode, kBoot);
    loop.set_view("the view", 99);
    loop.serve("mirror", std::make_shared<Mirror>(), "the regions");
    loop.serve("python", nullptr, "");
    loop.start();
  }
};

template <typename T>
std::string bytes_of(const T& value) {
  std::string out;
  p2pkv::wire::append(out, value);
  return out;
}

std::string connect_body(const std::string& name, const std::string& half) {
  return bytes_of(static_cast<uint32_t>(name.size())) + name + half;
}

TEST(control_loop_puts_gets_and_drops) {
  Served served("puts");
  Client client(served.context, served.address);
  const Location at{1, kBoot, 4096, 100, 8, 2, 3, 0, 1};
  CHECK(status_of(client.ask(Kind::kPut, 1, bytes_of(p2pkv::wire::PutEntry{key_of(1), 1, at}))) ==
        ReplyStatus::kOk);
  auto reply = client.ask(Kind::kGet, 2, bytes_of(key_of(2)) + bytes_of(key_of(1)));
  CHECK(status_of(reply) == ReplyStatus::kOk);
  CHECK(reply->body == std::string("\0\1", 2) + bytes_of(at));
  CHECK_EQ(reply->header.boot, kBoot);
  const p2pkv::wire::DropEntry drop{key_of(1), 2, 1, kBoot, 2};
  CHECK(status_of(client.ask(Kind::kDrop, 1, bytes_of(drop))) == ReplyStatus::kOk);
  reply = client.ask(Kind::kGet, 1, bytes_of(key_of(1)));
  CHECK(reply->body == std::string(1, '\0'));
}

TEST(control_loop_says_when_the_shard_is_full) {
  Served served("full");
  Client client(served.context, served.address);
  std::string body;
  for (uint64_t name = 0; name < p2pkv::wire::kMaxEntries; ++name) {
    body += bytes_of(p2pkv::wire::PutEntry{key_of(name), 1, Location{1, kBoot, 0, 1, 8, 2, 3, 0, 1}});
  }
  CHECK(status_of(client.ask(Kind::kPut, p2pkv::wire::kMaxEntries, body)) == ReplyStatus::kFull);
  CHECK(status_of(client.ask(Kind::kProbe, 1, {})) == ReplyStatus::kOk);
}

// However many pages somebody takes back, whoever else asks is answered meanwhile.
TEST(control_loop_answers_others_while_many_guests_go) {
  constexpr uint64_t kSource = 77, kLog = 9;
  constexpr size_t kGuests = 65536;
  Served served("guests");
  p2pkv::PoolOptions options{};
  options.nbytes = kGuests * 64;
  options.granule = 64;
  std::string error;
  const auto pool = p2pkv::Pool::create(options, &error);
  const auto guests = std::make_shared<p2pkv::Guests>(pool, std::make_shared<p2pkv::NamespaceEpochs>());
  guests->followed(kSource, {kLog, 0});
  const std::vector<uint8_t> bytes(64, 0x5a);
  Location at{};
  at.length = bytes.size();
  at.checksum = p2pkv::checksum(bytes.data(), bytes.size());
  std::vector<p2pkv::Key> keys;
  for (uint64_t name = 0; name < kGuests; ++name) keys.push_back(key_of(name));
  const std::vector<int64_t> addresses(kGuests, reinterpret_cast<int64_t>(bytes.data()));
  const std::vector<p2pkv::Origin> origins(kGuests, p2pkv::Origin{kSource, {kLog, 0}});
  std::vector<Location> locations(kGuests, at);
  std::vector<p2pkv::StoreStatus> statuses(kGuests);
  guests->store(keys.data(), addresses.data(), origins.data(), kGuests, 0, locations.data(), statuses.data());
  CHECK_EQ(guests->stats().pages, kGuests);
  served.loop.serve_guests(guests);
  Client client(served.context, served.address);
  const p2pkv::TakeBack told{kSource, kLog, 0, 1, 1};
  client.send(Client::pack(Kind::kTakeBack, 1, 0, bytes_of(told)));
  client.send(Client::pack(Kind::kProbe, 2, 1, {}));
  const auto first = client.receive();
  CHECK(status_of(first) == ReplyStatus::kOk);
  CHECK_EQ(first->header.request_id, 2u);
  const auto second = client.receive();
  CHECK(status_of(second) == ReplyStatus::kOk);
  CHECK_EQ(second->header.request_id, 1u);
  CHECK_EQ(guests->stats().pages, 0u);
  CHECK_EQ(pool->stats().pages, 0u);
  served.loop.serve_guests(nullptr);
}

TEST(control_loop_keeps_questions_for_a_cache_that_is_about_to_be_there) {
  Served served("starting");
  Client client(served.context, served.address);
  CHECK(status_of(client.ask(Kind::kTakeOver, 0, {})) == ReplyStatus::kRefused);
  served.loop.await_guests();
  client.send(Client::pack(Kind::kTakeOver, 2, 0, {}));
  auto kept = served.loop.take(Kind::kTakeOver, 60.0);
  CHECK(kept.has_value());
  served.loop.reply(kept->route, ReplyStatus::kOk, "room");
  CHECK(client.receive()->body == "room");
  served.loop.serve_guests(nullptr);
  CHECK(status_of(client.ask(Kind::kTakeOver, 0, {})) == ReplyStatus::kRefused);
}

TEST(control_loop_answers_no_one_before_it_is_announced_and_after_it_withdrew) {
  Served served("announced");
  Client client(served.context, served.address);
  const auto probe = client.ask(Kind::kProbe, 1, {});
  CHECK(probe->body == bytes_of(p2pkv::wire::ProbeReply{kNode, 99}));
  CHECK(status_of(client.ask(Kind::kProbe, 1, {}, kBoot - 1)) == ReplyStatus::kWrongBoot);
  served.loop.withdraw();
  const auto before = served.loop.stats().requests;
  client.send(Client::pack(Kind::kProbe, 1, 1, {}));
  while (served.loop.stats().requests == before) std::this_thread::yield();
  served.loop.announce(kNode, kBoot + 1);
  // Answers come in order: had the probe been answered, its reply would come first.
  client.send(Client::pack(Kind::kProbe, 2, 1, {}));
  const auto reply = client.receive();
  CHECK(reply.has_value());
  CHECK_EQ(reply->header.request_id, 2u);
  CHECK_EQ(reply->header.boot, kBoot + 1);
}

TEST(control_loop_connects_natively_or_asks_python) {
  Served served("connects");
  Client client(served.context, served.address);
  auto reply = client.ask(Kind::kConnect, 1, connect_body("mirror", "abc"));
  CHECK(status_of(reply) == ReplyStatus::kOk);
  CHECK(reply->body == bytes_of(uint32_t{4}) + "cba!" + "the regions");
  reply = client.ask(Kind::kConnect, 1, connect_body("mirror", "no"));
  CHECK(status_of(reply) == ReplyStatus::kRefused);
  CHECK(reply->body == "not you");
  CHECK(status_of(client.ask(Kind::kConnect, 1, connect_body("none", "x"))) == ReplyStatus::kRefused);

  client.send(Client::pack(Kind::kConnect, 9, 1, connect_body("python", "half")));
  const auto event = served.loop.take(Kind::kConnect, 10.0);
  CHECK(event.has_value());
  CHECK(event->body == connect_body("python", "half"));
  served.loop.reply(event->route, ReplyStatus::kOk, "done");
  reply = client.receive();
  CHECK(reply.has_value());
  CHECK_EQ(reply->header.request_id, 9u);
  CHECK(reply->body == "done");
  served.loop.reply("no route", ReplyStatus::kOk, "");  // dropped
  served.loop.reply(std::string(40, 'x'), ReplyStatus::kOk, "");
}

TEST(control_loop_answers_an_exchange_and_queues_what_came) {
  Served served("exchange");
  Client client(served.context, served.address);
  const auto reply = client.ask(Kind::kExchange, 1, "their view");
  CHECK(reply->body == "the view");
  const auto event = served.loop.take(Kind::kExchange, 10.0);
  CHECK(event.has_value());
  CHECK(event->route.empty());
  CHECK(event->body == "their view");
}

TEST(control_loop_hands_a_question_for_counters_to_python) {
  Served served("counters");
  Client client(served.context, served.address);
  CHECK(client.ask(Kind::kCounters, 1, "a body")->header.status ==
        static_cast<uint32_t>(ReplyStatus::kMalformed));
  std::thread python([&] {
    const auto event = served.loop.take(Kind::kCounters, 10.0);
    served.loop.reply(event->route, ReplyStatus::kOk, "the counters");
  });
  CHECK(client.ask(Kind::kCounters, 1, "")->body == "the counters");
  python.join();
}

TEST(control_loop_drops_the_oldest_event_that_nobody_takes) {
  Served served("events");
  Client client(served.context, served.address);
  for (int i = 0; i < 300; ++i) CHECK(client.ask(Kind::kExchange, 1, std::to_string(i)).has_value());
  while (served.loop.stats().dropped_events < 44)
    std::this_thread::yield();  // the answer comes before the event
  CHECK_EQ(served.loop.stats().dropped_events, 44u);
  CHECK(served.loop.take(Kind::kExchange, 0.0)->body == "44");
}

TEST(control_loop_take_ends_when_woken_or_stopped) {
  Served served("take");
  CHECK(!served.loop.take(Kind::kExchange, 0.0));
  served.loop.wake(Kind::kExchange);  // before the take: it is not lost
  CHECK(!served.loop.take(Kind::kExchange, 60.0));
  std::thread waker([&] { served.loop.wake(Kind::kExchange); });
  CHECK(!served.loop.take(Kind::kExchange, 60.0));
  waker.join();
  std::thread taker([&] { CHECK(!served.loop.take(Kind::kConnect, 60.0)); });
  served.loop.stop();
  taker.join();
  CHECK(!served.loop.take(Kind::kConnect, 60.0));
  served.loop.stop();
}

TEST(control_loop_binds_more_addresses_and_none_when_stopped) {
  Served served("binds");
  CHECK_EQ(served.loop.bind("inproc://binds-more"), 0);
  Client client(served.context, "inproc://binds-more");
  CHECK(status_of(client.ask(Kind::kProbe, 1, {})) == ReplyStatus::kOk);
  CHECK_EQ(served.loop.bind("inproc://binds-more"), EADDRINUSE);
  CHECK(served.loop.bind("nonsense") != 0);
  CHECK(served.loop.unbind("inproc://never-bound") != 0);
  CHECK_EQ(served.loop.unbind("inproc://binds-more"), 0);
  CHECK_EQ(served.loop.bind("inproc://binds-more"), 0);
  served.loop.stop();
  CHECK_EQ(served.loop.bind("inproc://binds-late"), ECANCELED);
}

TEST(control_loop_stops_under_every_kind_of_call) {
  for (int round = 0; round < 20; ++round) {
    Served served(("stops-" + std::to_string(round)).c_str());
    std::atomic<bool> go{true};
    std::vector<std::thread> threads;
    threads.emplace_back([&] {
      for (int i = 0; go; ++i) {
        const int result =
            served.loop.bind("inproc://more-" + std::to_string(round) + "-" + std::to_string(i));
        CHECK(result == 0 || result == ECANCELED);
      }
    });
    threads.emplace_back([&] {
      while (go) served.loop.take(Kind::kExchange, 0.001);
    });
    threads.emplace_back([&] {
      while (go)
        served.loop.wake(Kind::kExchange), served.loop.reply(std::string(40, 'r'), ReplyStatus::kOk, "late");
    });
    threads.emplace_back([&] {
      for (uint64_t i = 0; go; ++i) served.loop.set_view(std::string(i % 1000, 'v'), i), served.loop.stats();
    });
    {
      Client client(served.context, served.address);
      for (int i = 0; i < 20; ++i) CHECK(client.ask(Kind::kExchange, 1, "view").has_value());
      served.loop.stop();
    }
    go = false;
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(control_loop_ends_with_its_context) {
  Served served("context");
  Client client(served.context, served.address);
  CHECK(status_of(client.ask(Kind::kProbe, 1, {})) == ReplyStatus::kOk);
  served.context.shutdown();
  served.loop.stop();
}

// A message as a peer with the secret, but of another mind, might send it.
std::string mangled(std::mt19937_64& random) {
  std::string body(random() % 300, '\0');
  for (char& byte : body) byte = static_cast<char>(random());
  const auto kind = static_cast<Kind>(random() % 8);
  uint32_t count = static_cast<uint32_t>(random() % 4 == 0 ? random() : random() % 20);
  if (random() % 2 == 0) {
    const size_t sizes[] = {
        1, 1, sizeof(Key), sizeof(p2pkv::wire::PutEntry), sizeof(p2pkv::wire::DropEntry), 1, 1, 1};
    count = static_cast<uint32_t>(random() % 5);
    body.resize(sizes[static_cast<size_t>(kind)] * count,
                'b');  // lengths that fit, with contents that do not
  }
  if (kind == Kind::kConnect && random() % 2 == 0) {
    body = connect_body(random() % 2 == 0 ? "mirror" : "python", body);
    if (random() % 4 == 0) body[random() % 4] = static_cast<char>(random());
  }
  std::string message = Client::pack(kind, random(), count, body, random() % 8 == 0 ? random() : 0);
  if (random() % 4 == 0) message[random() % message.size()] ^= static_cast<char>(1 << (random() % 8));
  if (random() % 8 == 0) message.resize(random() % (message.size() + 1));
  return message;
}

TEST(control_loop_survives_whatever_comes) {
  std::mt19937_64 random(p2pkv::test::seed("control_loop_survives_whatever_comes"));
  Served served("fuzz");
  Client honest(served.context, served.address);
  uint64_t n_sent = 0;
  for (int round = 0; round < 20; ++round) {
    Client stranger(served.context, served.address);
    for (int i = 0; i < 500; ++i, ++n_sent) {
      if (random() % 16 == 0) {
        std::vector<std::string> frames(1 + random() % 40);
        for (std::string& frame : frames) frame = random() % 2 == 0 ? mangled(random) : "";
        stranger.send(frames);
      } else {
        stranger.send(mangled(random));
      }
      if (i % 20 == 0) {
        while (stranger.receive(0)) {
        }
      }
    }
    const auto reply = honest.ask(Kind::kProbe, 1, {});
    CHECK(status_of(reply) == ReplyStatus::kOk);
    CHECK(reply->body == bytes_of(p2pkv::wire::ProbeReply{kNode, 99}));
  }
  while (served.loop.stats().requests < n_sent + 20) std::this_thread::yield();
  CHECK(served.loop.stats().malformed > 0);
  CHECK(served.shard->stats().entries <= 5 * n_sent);
}

}  // namespace
