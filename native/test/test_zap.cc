// The ZAP handler: one key gets in, by CURVE and in its domain; nothing else does, whatever it says.
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "control/zap.h"
#include "seed.h"
#include "zmq_library.h"

namespace {

using p2pkv::Refusals;
using p2pkv::ZapHandler;
using p2pkv::test::ZmqContext;
using p2pkv::test::ZmqSocket;

const std::string kKey(32, 'k');
const std::string kKeyBefore(32, 'o');

struct Door {
  ZmqContext context;
  ZmqSocket socket{context, p2pkv::test::kRouter};
  ZmqSocket client{context, p2pkv::test::kDealer};
  bool bound = socket.bind("inproc://zap-test");
  std::shared_ptr<Refusals> refusals = std::make_shared<Refusals>();
  ZapHandler handler{socket.native(), "p2pkv", {kKeyBefore, kKey}, refusals};

  Door() {
    CHECK(bound);
    CHECK(client.connect("inproc://zap-test"));
  }

  // The status code of the answer; empty for none.
  std::string ask(const std::vector<std::string>& frames, long timeout_ms = 10'000) {
    client.send(frames);
    std::vector<std::string> answer;
    while (auto frame = client.receive(answer.empty() ? timeout_ms : 0)) {
      answer.push_back(*frame);
      if (answer.size() == 7) break;
    }
    return answer.size() == 7 && answer[1] == "1.0" && answer[2] == "id" ? answer[3] : "";
  }
};

std::vector<std::string> request(const std::string& domain, const std::string& mechanism,
                                 const std::string& key) {
  return {"", "1.0", "id", domain, "127.0.0.1", "", mechanism, key};
}

TEST(zap_admits_the_clusters_key_only) {
  Door door;
  CHECK(door.ask(request("p2pkv", "CURVE", kKey)) == "200");
  CHECK_EQ(door.refusals->count(), 0u);
  std::string nearly = kKey;
  nearly.back() ^= 1;
  CHECK(door.ask(request("p2pkv", "CURVE", nearly)) == "400");
  CHECK(door.ask(request("p2pkv", "CURVE", kKey.substr(1))) == "400");
  CHECK(door.ask(request("p2pkv", "CURVE", kKey + "k")) == "400");
  CHECK(door.ask(request("p2pkv", "CURVE", "")) == "400");
  CHECK(door.ask(request("p2pkv", "PLAIN", kKey)) == "400");
  CHECK(door.ask(request("p2pkv", "NULL", kKey)) == "400");
  CHECK(door.ask(request("other", "CURVE", kKey)) == "400");
  CHECK(door.ask(request("", "CURVE", kKey)) == "400");
  CHECK_EQ(door.refusals->count(), 8u);
}

TEST(zap_admits_nobody_for_nonsense) {
  std::mt19937_64 random(p2pkv::test::seed("zap_admits_nobody_for_nonsense"));
  Door door;
  for (int i = 0; i < 5000; ++i) {
    auto frames = request("p2pkv", "CURVE", std::string(32, static_cast<char>(random() % 'k')));
    frames.resize(1 + random() % 12);
    const std::string nonsense(random() % 64, static_cast<char>(random()));
    if (nonsense == kKey || nonsense == kKeyBefore) continue;
    frames[random() % frames.size()] = nonsense;
    door.client.send(frames);
    std::vector<std::string> answer;
    while (auto frame = door.client.receive(0)) {
      CHECK(*frame != "200");
    }
  }
  // Those still under way come before the answer to this one.
  CHECK(!door.ask(request("p2pkv", "CURVE", kKey)).empty() || door.refusals->count() > 0);
}

TEST(zap_stops_while_it_is_asked) {
  for (int round = 0; round < 20; ++round) {
    Door door;
    std::thread asker([&] {
      for (int i = 0; i < 50; ++i) door.client.send(request("p2pkv", "CURVE", kKey));
    });
    door.handler.stop();
    door.handler.stop();
    asker.join();
  }
}

}  // namespace
