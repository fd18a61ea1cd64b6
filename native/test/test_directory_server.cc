// The shard's fast way in: who gets an answer, what is hung up on, and that nobody waits for ever.
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../src/directory/directory_frames.h"
#include "../src/directory/sealed_stream.h"
#include "../src/transports/listener.h"
#include "check.h"
#include "keys.h"
#include "p2pkv/directory_channel.h"
#include "p2pkv/directory_server.h"
#include "zmq_library.h"

namespace {

using p2pkv::Address;
using p2pkv::AskBatch;
using p2pkv::Deadline;
using p2pkv::DirectoryChannel;
using p2pkv::DirectoryDoorBlob;
using p2pkv::DirectoryServer;
using p2pkv::Key;
using p2pkv::Location;
using p2pkv::RingTable;
using p2pkv::SealedStream;
using p2pkv::Shard;
using p2pkv::Side;
using p2pkv::UniqueFd;
using p2pkv::test::key_of;
using p2pkv::wire::Kind;

constexpr uint64_t kBoot = 5;
constexpr uint64_t kOwner = 1;

struct Served {
  p2pkv::test::ZmqContext loads_the_library;
  std::shared_ptr<Shard> shard = std::make_shared<Shard>(1 << 20);
  std::string error;
  std::shared_ptr<DirectoryServer> server;

  Served() {
    shard->set_view(&kOwner, &kBoot, 1);
    server = DirectoryServer::start("127.0.0.1", "", shard, &error);
    CHECK(server != nullptr);
    server->announce(kBoot);
  }

  std::string door() { return server->accept(DirectoryChannel::request(), &error); }
  std::shared_ptr<DirectoryChannel> channel(uint64_t boot = kBoot) {
    return DirectoryChannel::open(door(), boot, 10.0, &error);
  }
};

// A ring of one member, whom another one asks.
std::shared_ptr<RingTable> ring_of_one() {
  return std::make_shared<RingTable>(RingTable{{0}, {0}, 1, {1}, -1});
}

std::vector<Key> keys_from(uint64_t first, size_t n) {
  std::vector<Key> keys;
  for (size_t i = 0; i < n; ++i) keys.push_back(key_of(first + i));
  return keys;
}

struct Answer {
  size_t n_found = 0;
  bool is_usable = false;
  bool is_answered = false;
};

std::vector<uint8_t> ask(AskBatch& batch, const p2pkv::DirectoryQuestion& question,
                         const std::shared_ptr<DirectoryChannel>& channel, double timeout) {
  p2pkv::DirectoryExchange exchange(batch, question, {{0, channel}});
  exchange.wait(Deadline::after(timeout), Deadline::after(timeout));
  return exchange.end(Deadline::after(0));
}

Answer look_up(const std::shared_ptr<DirectoryChannel>& channel, const std::vector<Key>& keys,
               double timeout = 10.0) {
  AskBatch batch(keys.data(), keys.size(), nullptr, ring_of_one());
  std::vector<uint8_t> found(keys.size());
  std::vector<Location> locations(keys.size());
  const p2pkv::DirectoryQuestion question{Kind::kGet, reinterpret_cast<const uint8_t*>(keys.data()),
                                          sizeof(Key), found.data(), locations.data()};
  const auto usable = ask(batch, question, channel, timeout);
  Answer answer;
  answer.is_usable = usable.front() != 0;
  answer.is_answered = batch.asks().front().is_answered;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (found[i] == 0) continue;
    ++answer.n_found;
    CHECK_EQ(locations[i].owner, kOwner);
    CHECK_EQ(locations[i].offset, keys[i].bytes[0] * uint64_t{4096});
  }
  return answer;
}

constexpr uint64_t kLease = 0x1ea5e;

// Holds promotions until the test answers them.
class HeldPromoter final : public p2pkv::Promoter {
 public:
  void promote(std::vector<Key> keys, Lease lease, Deadline, Done done) override {
    const std::lock_guard lock(mutex_);
    CHECK_EQ(lease.seconds, 2.0);
    CHECK_EQ(lease.id, kLease);
    CHECK(lease.asker != 0);
    asker_ = lease.asker;
    held_.push_back({std::move(keys), std::move(done)});
    came_.notify_all();
  }
  void release(uint64_t lease) override {
    const std::lock_guard lock(mutex_);
    CHECK_EQ(lease, kLease);
    ++n_released_;
    came_.notify_all();
  }
  void leave(uint64_t asker) override {
    const std::lock_guard lock(mutex_);
    if (asker != asker_) return;  // a channel that asked for nothing
    ++n_left_;
    came_.notify_all();
  }
  void wait_left(size_t n) {
    std::unique_lock lock(mutex_);
    came_.wait(lock, [&] { return n_left_ >= n; });
  }
  void wait_released(size_t n) {
    std::unique_lock lock(mutex_);
    came_.wait(lock, [&] { return n_released_ >= n; });
  }
  // Waits for one, and finds every other key of it.
  void answer_one() {
    std::unique_lock lock(mutex_);
    came_.wait(lock, [this] { return !held_.empty(); });
    const Held held = std::move(held_.front());
    held_.pop_front();
    lock.unlock();
    std::vector<uint8_t> found(held.keys.size());
    std::vector<Location> locations(held.keys.size());
    for (size_t i = 0; i < found.size(); i += 2) {
      found[i] = 1;
      locations[i].owner = kOwner;
      locations[i].offset = held.keys[i].bytes[0] * uint64_t{4096};
      locations[i].flags = p2pkv::kResident;
    }
    held.done(std::move(found), std::move(locations));
  }

 private:
  struct Held {
    std::vector<Key> keys;
    Done done;
  };
  std::mutex mutex_;  // guards all below
  std::condition_variable came_;
  std::deque<Held> held_;
  size_t n_released_ = 0;
  size_t n_left_ = 0;
  uint64_t asker_ = 0;
};

Answer promote(const std::shared_ptr<DirectoryChannel>& channel, const std::vector<Key>& keys,
               double timeout = 10.0) {
  const std::vector<int32_t> members(keys.size(), 0);
  AskBatch batch(members.data(), members.size(), ring_of_one());
  std::vector<p2pkv::wire::PromoteEntry> entries;
  for (const Key& key : keys) entries.push_back({key, 1000, 2000, kLease});
  std::vector<uint8_t> found(keys.size());
  std::vector<Location> locations(keys.size());
  const p2pkv::DirectoryQuestion question{Kind::kPromote, reinterpret_cast<const uint8_t*>(entries.data()),
                                          sizeof entries[0], found.data(), locations.data()};
  const auto usable = ask(batch, question, channel, timeout);
  Answer answer;
  answer.is_usable = usable.front() != 0;
  answer.is_answered = batch.asks().front().is_answered;
  for (const uint8_t there : found) answer.n_found += there;
  return answer;
}

bool tell(const std::shared_ptr<DirectoryChannel>& channel, Kind kind, const std::vector<Key>& keys,
          uint64_t sequence) {
  AskBatch batch(keys.data(), keys.size(), nullptr, ring_of_one());
  std::vector<p2pkv::wire::PutEntry> puts;
  std::vector<p2pkv::wire::DropEntry> drops;
  for (const Key& key : keys) {
    Location location{};
    location.owner = kOwner;
    location.boot = kBoot;
    location.offset = key.bytes[0] * uint64_t{4096};
    location.generation = 2;
    puts.push_back({key, sequence, location});
    drops.push_back({key, sequence, kOwner, kBoot, 2});
  }
  const bool is_put = kind == Kind::kPut;
  const auto* records =
      is_put ? reinterpret_cast<const uint8_t*>(puts.data()) : reinterpret_cast<const uint8_t*>(drops.data());
  const size_t size = is_put ? sizeof puts[0] : sizeof drops[0];
  ask(batch, {kind, records, size}, channel, 10.0);
  return batch.asks().front().is_answered;
}

// A connection to the door that has shown its token, and knows the key or not.
struct Raw {
  DirectoryDoorBlob door;
  UniqueFd connection;

  explicit Raw(const std::string& blob, bool show_token = true) {
    std::memcpy(&door, blob.data(), sizeof door);
    Address address{door.family, door.port, door.scope, {}};
    std::memcpy(address.bytes, door.address, sizeof address.bytes);
    connection = p2pkv::start_connecting(address);
    pollfd connected{connection.get(), POLLOUT, 0};
    CHECK_EQ(poll(&connected, 1, 10'000), 1);
    p2pkv::Hello hello{p2pkv::kDirectoryHelloMagic, p2pkv::kFrameVersion, 0, door.token};
    if (!show_token) hello.token.fill(7);
    write(std::string(reinterpret_cast<const char*>(&hello), sizeof hello));
  }

  void write(const std::string& bytes) const {
    CHECK_EQ(send(connection.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
             static_cast<ssize_t>(bytes.size()));
  }
  bool is_hung_up_on() const {
    pollfd readable{connection.get(), POLLIN, 0};
    char byte;
    return poll(&readable, 1, 10'000) == 1 && recv(connection.get(), &byte, 1, 0) <= 0;
  }
};

// The bytes of a frame that asks for nothing, as the reader of `door` seals its first.
std::string sealed_question(const DirectoryDoorBlob& door) {
  int pair[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair), 0);
  SealedStream stream(UniqueFd(pair[0]), door.key, Side::kReader);
  const UniqueFd other(pair[1]);
  const p2pkv::wire::Header header{
      p2pkv::wire::kMagic, p2pkv::wire::kVersion, static_cast<uint16_t>(Kind::kGet), 1, kBoot, 0, 0};
  stream.put({reinterpret_cast<const char*>(&header), sizeof header}, {});
  CHECK(stream.flush());
  std::string bytes(256, '\0');
  const ssize_t n = recv(other.get(), bytes.data(), bytes.size(), 0);
  CHECK(n > 0);
  bytes.resize(static_cast<size_t>(n));
  return bytes;
}

}  // namespace

TEST(directory_channel_puts_gets_and_drops) {
  Served served;
  const auto channel = served.channel();
  CHECK(channel != nullptr);
  const auto keys = keys_from(1, 100);
  CHECK_EQ(look_up(channel, keys).n_found, 0u);
  CHECK(tell(channel, Kind::kPut, keys, 1));
  CHECK_EQ(look_up(channel, keys).n_found, 100u);
  CHECK(tell(channel, Kind::kDrop, keys_from(1, 50), 2));
  CHECK_EQ(look_up(channel, keys).n_found, 50u);
  CHECK(look_up(channel, keys).is_usable);
}

TEST(directory_channel_takes_batches_of_every_size) {
  Served served;
  const auto channel = served.channel();
  const auto keys = keys_from(1, p2pkv::wire::kMaxEntries);
  CHECK(tell(channel, Kind::kPut, keys, 1));
  for (const size_t n : {size_t{1}, size_t{200}, size_t{5000}, keys.size(), size_t{1}}) {
    CHECK_EQ(look_up(channel, {keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(n)}).n_found, n);
  }
}

TEST(directory_channel_refuses_an_earlier_boot) {
  Served served;
  const auto channel = served.channel(kBoot - 1);
  CHECK(channel != nullptr);  // the door is the right one; what is asked through it is not
  const Answer answer = look_up(channel, keys_from(1, 3));
  CHECK(!answer.is_answered);
  CHECK(answer.is_usable);
}

// Two owners of every key, and who asks them.
struct TwoOwners {
  Served first, second;
  std::vector<std::shared_ptr<DirectoryChannel>> channels{first.channel(), second.channel()};
  std::vector<Key> keys = keys_from(1, 20);
  std::vector<uint8_t> found = std::vector<uint8_t>(20);
  std::vector<Location> locations = std::vector<Location>(20);

  // Who was asked, once for each ask.
  std::vector<int32_t> get(std::vector<uint8_t>* usable = nullptr, double patience = 10.0) {
    const auto ring = std::make_shared<RingTable>(RingTable{{0}, {0, 1}, 2, {1, 1}, -1});
    AskBatch batch(keys.data(), keys.size(), nullptr, ring, AskBatch::Order::kInTurn);
    p2pkv::DirectoryExchange exchange(batch,
                                      {Kind::kGet, reinterpret_cast<const uint8_t*>(keys.data()), sizeof(Key),
                                       found.data(), locations.data()},
                                      {{0, channels[0]}, {1, channels[1]}});
    exchange.wait(Deadline::after(10.0), Deadline::after(patience));
    const auto is_usable = exchange.end(Deadline::after(10.0));
    if (usable != nullptr) *usable = is_usable;
    std::vector<int32_t> asked;
    for (const AskBatch::Ask& ask : batch.asks()) asked.push_back(ask.owner);
    return asked;
  }
};

TEST(directory_exchange_asks_the_second_owner_of_what_the_first_does_not_know) {
  TwoOwners owners;
  CHECK(tell(owners.channels[0], Kind::kPut, keys_from(1, 15), 1));
  CHECK(tell(owners.channels[1], Kind::kPut, keys_from(11, 10), 1));
  const auto asked = owners.get();
  CHECK(asked.size() >= 2);  // more on a machine that is so busy that the first is late
  for (const uint8_t there : owners.found) CHECK_EQ(there, 1);
}

TEST(directory_channel_skips_answers_that_come_too_late) {
  TwoOwners owners;
  CHECK(tell(owners.channels[1], Kind::kPut, owners.keys, 1));
  // The first owner hears no look-up while it promotes for the same reader.
  const auto promoter = std::make_shared<HeldPromoter>();
  owners.first.server->serve_promotions(promoter);
  const std::vector<int32_t> members(1, 0);
  AskBatch batch(members.data(), 1, ring_of_one());
  const p2pkv::wire::PromoteEntry entry{owners.keys[0], 1000, 2000, kLease};
  uint8_t found = 0;
  Location location{};
  p2pkv::DirectoryExchange promotion(
      batch, {Kind::kPromote, reinterpret_cast<const uint8_t*>(&entry), sizeof entry, &found, &location},
      {{0, owners.channels[0]}});
  std::vector<uint8_t> usable;
  for (size_t i = 0; i < 5; ++i) {
    std::fill(owners.found.begin(), owners.found.end(), uint8_t{0});
    CHECK_EQ(owners.get(&usable).size(), 2u);  // the second after the first was late
    CHECK_EQ(usable[0], 1);
    CHECK_EQ(owners.channels[0]->n_late(), i + 1);
    for (const uint8_t there : owners.found) CHECK_EQ(there, 1);
  }
  owners.channels[0].reset();
  promoter->answer_one();
}

TEST(directory_server_hangs_up_on_who_has_no_token_or_shows_it_twice) {
  Served served;
  CHECK(Raw(served.door(), false).is_hung_up_on());
  const std::string door = served.door();
  const Raw first(door);
  CHECK(Raw(door).is_hung_up_on());
}

TEST(directory_server_hangs_up_on_who_has_no_key) {
  Served served;
  const Raw stranger(served.door());
  stranger.write(std::string("\x40\0\0\0", 4) + std::string(64, 'x'));
  CHECK(stranger.is_hung_up_on());
  const Raw oversized(served.door());
  oversized.write("\xff\xff\xff\x7f");
  CHECK(oversized.is_hung_up_on());
}

TEST(directory_server_hangs_up_on_a_frame_changed_or_repeated) {
  Served served;
  {
    const Raw honest(served.door());
    honest.write(sealed_question(honest.door));
    char answer[4];
    pollfd readable{honest.connection.get(), POLLIN, 0};
    CHECK_EQ(poll(&readable, 1, 10'000), 1);
    CHECK_EQ(recv(honest.connection.get(), answer, sizeof answer, 0), 4);
  }
  const std::string whole = sealed_question(Raw(served.door()).door);
  for (const size_t flipped : {size_t{4}, size_t{20}, whole.size() - 1}) {
    const Raw forger(served.door());
    std::string frame = sealed_question(forger.door);
    frame[flipped] = static_cast<char>(frame[flipped] ^ 1);
    forger.write(frame);
    CHECK(forger.is_hung_up_on());
  }
  const Raw repeater(served.door());
  const std::string frame = sealed_question(repeater.door);
  repeater.write(frame + frame);
  std::string answered(4096, '\0');
  pollfd readable{repeater.connection.get(), POLLIN, 0};
  ssize_t n = 1;
  while (n > 0 && poll(&readable, 1, 10'000) == 1) {
    n = recv(repeater.connection.get(), answered.data(), answered.size(), 0);
  }
  CHECK(n <= 0);  // after the first answer
}

TEST(directory_channel_waits_no_longer_than_told_and_is_then_done_for) {
  Served served;
  Address address;
  std::string error;
  const UniqueFd silent = p2pkv::listen_on("127.0.0.1", 0, "", &address, &error);
  std::string door = served.door();
  reinterpret_cast<DirectoryDoorBlob*>(door.data())->port = address.port;
  CHECK(DirectoryChannel::open(door, kBoot, 0.05, &error) == nullptr);
  CHECK(error == "it does not answer");
}

TEST(directory_channel_finds_its_owner_gone) {
  Served served;
  const auto channel = served.channel();
  served.server->close();
  const Answer answer = look_up(channel, keys_from(1, 3));
  CHECK(!answer.is_answered);
  CHECK(!answer.is_usable);
  CHECK(served.channel() == nullptr);
}

TEST(directory_server_answers_others_while_a_promotion_takes_its_time) {
  Served served;
  const auto slow = served.channel();
  const auto other = served.channel();
  CHECK_EQ(promote(slow, keys_from(1, 10)).n_found, 0u);  // there is no disk tier
  const auto promoter = std::make_shared<HeldPromoter>();
  served.server->serve_promotions(promoter);
  std::thread asking([&slow] {
    const Answer answer = promote(slow, keys_from(1, 10));
    CHECK_EQ(answer.n_found, 5u);
    CHECK(answer.is_usable);
  });
  CHECK(look_up(other, keys_from(1, 10)).is_answered);
  promoter->answer_one();
  asking.join();
  CHECK(look_up(slow, keys_from(1, 10)).is_answered);
}

TEST(directory_server_hears_that_a_lease_is_over) {
  Served served;
  const auto channel = served.channel();
  CHECK(channel->release(kLease));  // nobody promotes here
  CHECK(look_up(channel, keys_from(1, 10)).is_answered);
  const auto promoter = std::make_shared<HeldPromoter>();
  served.server->serve_promotions(promoter);
  CHECK(channel->release(kLease));
  CHECK(channel->release(kLease));
  CHECK(look_up(channel, keys_from(1, 10)).is_answered);  // in the order of the questions
  promoter->wait_released(2);
}

TEST(directory_server_ends_the_lease_of_who_hangs_up_on_a_promotion) {
  Served served;
  const auto promoter = std::make_shared<HeldPromoter>();
  served.server->serve_promotions(promoter);
  auto impatient = served.channel();
  CHECK(!promote(impatient, keys_from(1, 10), 0.01).is_answered);
  impatient.reset();
  promoter->wait_left(1);
  promoter->answer_one();  // to nobody
}

TEST(directory_server_outlives_who_does_not_wait_for_a_promotion) {
  Served served;
  const auto promoter = std::make_shared<HeldPromoter>();
  served.server->serve_promotions(promoter);
  auto impatient = served.channel();
  const Answer answer = promote(impatient, keys_from(1, 10), 0.01);
  CHECK(!answer.is_answered);
  CHECK(!answer.is_usable);
  impatient.reset();
  CHECK(look_up(served.channel(), keys_from(1, 10)).is_answered);
  promoter->answer_one();  // to nobody
  CHECK(look_up(served.channel(), keys_from(1, 10)).is_answered);
  auto closing = served.channel();
  CHECK(!promote(closing, keys_from(1, 10), 0.01).is_answered);
  served.server->close();
  promoter->answer_one();
}

TEST(directory_server_answers_many_at_once_and_closes_under_load) {
  Served served;
  CHECK(tell(served.channel(), Kind::kPut, keys_from(0, 200), 1));
  std::atomic<uint64_t> n_answers{0};
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 4; ++i) {
    threads.emplace_back([&served, &n_answers, i] {
      std::string error;
      const auto channel = DirectoryChannel::open(served.server->accept(DirectoryChannel::request(), &error),
                                                  kBoot, 10.0, &error);
      CHECK(channel != nullptr);
      const auto keys = keys_from(i * 50, 50);
      for (;;) {
        const Answer answer = look_up(channel, keys);
        if (!answer.is_answered) return;
        CHECK_EQ(answer.n_found, 50u);
        ++n_answers;
      }
    });
  }
  while (n_answers < 200) std::this_thread::yield();
  served.server->close();
  for (std::thread& thread : threads) thread.join();
}
