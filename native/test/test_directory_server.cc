// The shard's fast way in: who gets an answer, what is hung up on, and that nobody waits for ever.
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "directory/location_columns.h"
#include "directory/requests.h"
#include "served_directory.h"

namespace {

namespace wire = p2pkv::wire;

// A connection to the door that has shown its token, and knows the key or not.
struct Raw {
  DoorBlob door;
  UniqueFd connection;

  explicit Raw(const std::string& blob, bool show_token = true) {
    std::memcpy(&door, blob.data(), sizeof door);
    Address address{door.family, door.port, door.scope, {}};
    std::memcpy(address.bytes, door.address, sizeof address.bytes);
    connection = p2pkv::start_connecting(address);
    pollfd connected{connection.get(), POLLOUT, 0};
    CHECK_EQ(poll(&connected, 1, 10'000), 1);
    p2pkv::Hello hello{p2pkv::kDirectoryDoor.hello_magic, p2pkv::kFrameVersion, 0, door.token};
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
std::string sealed_question(const DoorBlob& door) {
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

TEST(directory_answers_locate_to_whoever_asks_for_it) {
  Served served;
  const auto keys = keys_from(1, 100);
  CHECK(tell(served.channel(), Kind::kPut, keys, 1));
  const wire::Header locate{
      wire::kMagic, wire::kVersion, static_cast<uint16_t>(Kind::kLocate), 1, kBoot, 100, 0};
  wire::Header get = locate;
  get.kind = static_cast<uint16_t>(Kind::kGet);
  const std::string_view body(reinterpret_cast<const char*>(keys.data()), keys.size() * sizeof(Key));
  const auto ask = [&](const wire::Header& header) {
    return p2pkv::answer_directory_request(*served.shard, header, wire::Reader(body), kBoot);
  };
  const std::string plain = ask(get);
  const std::string columns = ask(locate);
  CHECK(columns.size() < plain.size() / 2);
  std::vector<Location> locations;
  CHECK(p2pkv::take_columns(std::string_view(columns).substr(sizeof get + keys.size()), keys.size(),
                            &locations));
  CHECK(std::memcmp(locations.data(), plain.data() + sizeof get + keys.size(),
                    keys.size() * sizeof(Location)) == 0);
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
  const UniqueFd silent = p2pkv::listen_on({}, &address, &error);
  std::string door = served.door();
  reinterpret_cast<DoorBlob*>(door.data())->port = address.port;
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
