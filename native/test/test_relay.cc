// Passing streams on: what ends them, and who waits for whom.
#include <fcntl.h>
#include <sys/socket.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "check.h"
#include "relay/relay.h"

namespace {

using p2pkv::AnswerBody;
using p2pkv::EventStream;
using p2pkv::Patience;
using p2pkv::Relay;
using p2pkv::UniqueFd;
using End = Relay::End;

constexpr double kLong = 3600;

std::string chunk_of(std::string_view data) {
  char size[20];
  std::snprintf(size, sizeof size, "%zx\r\n", data.size());
  return size + std::string(data) + "\r\n";
}

// An engine and a client on both sides of a relay.
class Rig {
 public:
  explicit Rig(Patience patience = {kLong}, double client_patience = kLong)
      : patience_(std::make_shared<Patience>(patience)) {
    connect(engine_, engine_side_);
    connect(client_, client_side_);
    name_ =
        relay_.add(engine_side_.get(), client_side_.get(), std::make_shared<AnswerBody>(AnswerBody::kChunked),
                   std::make_shared<EventStream>(), patience_, client_patience);
    CHECK(name_ != Relay::kNone);
  }

  // Returns how many bytes the engine's socket took.
  size_t say(std::string_view raw) {
    const ssize_t n = ::send(engine_.get(), raw.data(), raw.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    return n < 0 ? 0 : static_cast<size_t>(n);
  }
  void run() { note(relay_.run()); }
  void sweep() { note(relay_.sweep()); }
  std::string hear(size_t most = 1 << 20) {
    std::string heard(most, '\0');
    const ssize_t n = recv(client_.get(), heard.data(), heard.size(), MSG_DONTWAIT);
    heard.resize(n < 0 ? 0 : static_cast<size_t>(n));
    return heard;
  }
  std::optional<End> end() const { return end_; }
  Patience& patience() { return *patience_; }
  std::string remove() { return relay_.remove(name_); }
  void leave() { client_.reset(); }
  void hang_up() { engine_.reset(); }
  // The owner closes its own descriptors.
  void abandon() {
    engine_side_.reset();
    client_side_.reset();
  }
  const Relay& relay() const { return relay_; }

 private:
  static void connect(UniqueFd& one, UniqueFd& other) {
    int both[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, both) == 0);
    one = UniqueFd(both[0]);
    other = UniqueFd(both[1]);
  }
  void note(const std::vector<Relay::Ended>& ended) {
    for (const auto& [name, why] : ended) {
      CHECK(name == name_ && !end_);
      end_ = why;
    }
  }

  Relay relay_;
  std::shared_ptr<Patience> patience_;
  UniqueFd engine_, engine_side_, client_, client_side_;
  uint64_t name_;
  std::optional<End> end_;
};

const std::string kEvent = "data: {\"text\": \"a\"}\n\n";
const std::string kDone = "data: [DONE]\n\n";

TEST(relay_passes_a_stream_on_to_its_end) {
  Rig rig;
  rig.abandon();
  for (int i = 0; i < 3; ++i) {
    rig.say(chunk_of(kEvent));
    rig.run();
    CHECK(rig.hear() == chunk_of(kEvent));
  }
  const std::string last = chunk_of(kEvent.substr(5) + kDone);
  rig.say(chunk_of(kEvent.substr(0, 5)));
  rig.run();
  CHECK(rig.hear().empty() && !rig.end());
  rig.say(last);
  rig.run();
  CHECK(rig.hear() == chunk_of(kEvent + kDone) && !rig.end());
  rig.say("0\r\n\r\n");
  rig.run();
  CHECK(rig.end() == End::kWhole && rig.hear().empty());
  CHECK(rig.remove().empty() && rig.relay().size() == 0);
}

TEST(relay_says_why_a_stream_is_not_whole) {
  const std::pair<std::string, End> ways[] = {
      {chunk_of(kEvent) + "0\r\n\r\n", End::kEndedEarly},
      {chunk_of(kEvent + kDone + "data: x") + "0\r\n\r\n", End::kEndedEarly},
      {chunk_of(kEvent) + "zz", End::kNoHttp},
      {chunk_of(kEvent) + "20000", End::kHungUp},
  };
  for (const auto& [said, end] : ways) {
    Rig rig;
    rig.say(said);
    rig.run();
    rig.hang_up();
    rig.run();
    CHECK(rig.end() == end && rig.remove().empty());
    const std::string heard = rig.hear();
    CHECK(heard.find(kEvent) != heard.npos && heard.ends_with("\n\n\r\n"));
  }
}

TEST(relay_ends_an_event_that_is_too_large) {
  Rig rig;
  const std::string said = "800000\r\n" + std::string(EventStream::kMaxEvent + 1, 'x');
  std::string_view left = said;
  while (!left.empty() && !rig.end()) {
    left.remove_prefix(rig.say(left.substr(0, 65536)));
    rig.run();
  }
  rig.run();
  CHECK(rig.end() == End::kTooLarge && rig.hear().empty());
}

TEST(relay_has_an_engine_wait_for_its_client) {
  Rig rig;
  const std::string chunk = chunk_of(std::string(30000, 'x') + "\n\n");
  std::string said, heard;
  // until the engine's own socket is full: so much lies in the kernel's buffers, and next to nothing here
  for (size_t n = chunk.size(); n == chunk.size(); said += chunk.substr(0, n)) {
    n = rig.say(chunk);
    rig.run();
    if (said.size() > (64u << 20)) break;
  }
  CHECK(said.size() < (8u << 20));
  const std::string rest = chunk.substr(said.size() % chunk.size()) + chunk_of(kDone) + "0\r\n\r\n";
  std::string_view left = rest;
  for (int i = 0; i < 100000 && rig.end() != End::kWhole; ++i) {
    left.remove_prefix(rig.say(left));
    rig.run();
    heard += rig.hear(10000);
  }
  CHECK(rig.end() == End::kWhole);
  while (true) {
    const std::string more = rig.hear();
    if (more.empty()) break;
    heard += more;
  }
  AnswerBody sent(AnswerBody::kChunked), got(AnswerBody::kChunked);
  std::string expected, payload;
  CHECK(sent.feed(said + rest, expected) && got.feed(heard, payload) && payload == expected);
}

TEST(relay_gives_back_what_a_client_has_not_taken) {
  Rig rig;
  std::string sent, heard;
  for (int i = 0; i < 200; ++i) {
    rig.say(chunk_of(std::string(30000, 'x') + "\n\n"));
    rig.run();
  }
  const std::string left = rig.remove();
  CHECK(!left.empty() && left.size() < 200000);
  while (true) {
    const std::string more = rig.hear();
    if (more.empty()) break;
    heard += more;
  }
  AnswerBody got(AnswerBody::kChunked);
  std::string payload;
  CHECK(got.feed(heard + left + "0\r\n\r\n", payload) && got.is_complete() && payload.ends_with("\n\n"));
}

TEST(relay_waits_for_nobody_for_ever) {
  Rig silent({0});
  silent.sweep();
  CHECK(silent.end() == End::kEngineSilent);
  Rig slow({kLong}, 0);
  slow.sweep();
  CHECK(!slow.end());
  for (int i = 0; i < 200; ++i) {
    slow.say(chunk_of(std::string(30000, 'x') + "\n\n"));
    slow.run();
  }
  slow.sweep();
  CHECK(slow.end() == End::kClientSlow);
  Rig gone;
  gone.leave();
  gone.say(chunk_of(kEvent));
  gone.run();
  CHECK(gone.end() == End::kClientGone);
  gone.run();  // said once
}

TEST(relay_has_less_patience_with_an_engine_that_fails) {
  Rig rig({kLong, 0});
  rig.sweep();
  CHECK(!rig.end());
  rig.patience().is_failing = true;
  rig.patience().is_failing = false;  // it has recovered before anybody looked
  rig.sweep();
  CHECK(!rig.end());
  rig.patience().is_failing = true;
  rig.sweep();
  CHECK(rig.end() == End::kEngineSilent);
}

}  // namespace
