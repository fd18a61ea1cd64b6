// A member who says anything over a directory's channel, as reader and as owner: nobody crashes, hangs or
// loses entries.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <thread>

#include "directory/location_columns.h"
#include "numbers.h"
#include "seed.h"
#include "served_directory.h"

namespace {

using p2pkv::test::Numbers;
namespace wire = p2pkv::wire;

void wait_for(const SealedStream& stream, short events, int ms) {
  pollfd waiting{stream.fd(), events, 0};
  poll(&waiting, 1, ms);
}

// A record's bytes: keys of nobody else's, and numbers near an end.
std::string record(Numbers& numbers, size_t size) {
  std::string out;
  wire::append(out, key_of(1'000'000 + numbers.below(500)));
  while (out.size() < size) wire::append(out, numbers.u64());
  out.resize(size);
  return out;
}

std::string question(Numbers& numbers) {
  static constexpr struct {
    Kind kind;
    size_t size;
  } kRequests[] = {{Kind::kGet, sizeof(Key)},
                   {Kind::kLocate, sizeof(Key)},
                   {Kind::kHeld, sizeof(Key)},
                   {Kind::kPut, sizeof(wire::PutEntry)},
                   {Kind::kDrop, sizeof(wire::DropEntry)},
                   {Kind::kCheck, sizeof(wire::CheckEntry)},
                   {Kind::kPromote, sizeof(wire::PromoteEntry)},
                   {Kind::kRelease, sizeof(uint64_t)}};
  const auto& request = kRequests[numbers.below(std::size(kRequests))];
  const size_t n = numbers.once_in(10) ? wire::kMaxEntries + numbers.below(3) - 1 : numbers.below(5);
  std::string body;
  for (size_t i = 0; i < n && body.size() + request.size < SealedStream::kMaxMessage - sizeof(wire::Header);
       ++i)
    body += record(numbers, request.size);
  const auto kind =
      numbers.once_in(10) ? static_cast<uint16_t>(numbers.u32()) : static_cast<uint16_t>(request.kind);
  const auto count = numbers.once_in(6) ? numbers.u32() : static_cast<uint32_t>(n);
  wire::Header header{
      wire::kMagic, wire::kVersion, kind, numbers.u64(), numbers.once_in(3) ? kBoot : 0, count, 0};
  if (numbers.once_in(20)) header.version = static_cast<uint16_t>(numbers.u32());
  if (numbers.once_in(40)) header.magic = numbers.u32();
  std::string message;
  wire::append(message, header);
  message += body;
  p2pkv::test::spoil(numbers, &message);
  return message;
}

// Asks an owner anything, and reads its answers now and then only.
void ask_anything(Served& served, Numbers& numbers, const std::atomic<bool>& is_over) {
  while (!is_over) {
    std::string error;
    const auto stream = p2pkv::knock(p2pkv::kDirectoryDoor, served.door(), &error);
    CHECK(stream != nullptr);
    if (!stream) return;
    bool is_open = true;
    for (uint64_t i = 0; i < 40 && is_open && !is_over; ++i) {
      stream->put(question(numbers), {});
      is_open = stream->flush();
      if (stream->has_outgoing()) wait_for(*stream, POLLIN | POLLOUT, 5);
      if (numbers.once_in(3)) continue;
      auto progress = stream->receive();
      while (progress == SealedStream::Progress::kFrame) progress = stream->receive();
      is_open = is_open && progress != SealedStream::Progress::kLost;
    }
  }
}

// Answers promotions at once, finding nothing, whoever asks and whatever for.
class EmptyPromoter final : public p2pkv::Promoter {
 public:
  void promote(std::vector<Key> keys, Lease lease, Deadline, Done done) override {
    CHECK(lease.seconds <= 3600);
    done(std::vector<uint8_t>(keys.size()), std::vector<Location>(keys.size()));
  }
  void release(uint64_t) override {}
  void leave(uint64_t) override {}
};

// An owner with the right key for its one reader, who answers each question nearly as it should.
class Liar {
 public:
  explicit Liar(uint64_t seed) : numbers_(seed) {
    std::string error;
    listener_ = p2pkv::listen_on({}, &address_, &error);
    CHECK(bool(listener_));
    thread_ = std::thread([this] { run(); });
  }
  ~Liar() {
    shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
  }

  std::string door() const {
    DoorBlob door{};
    door.magic = p2pkv::kDirectoryDoor.door_magic;
    door.version = p2pkv::kFrameVersion;
    door.port = address_.port;
    door.family = address_.family;
    std::copy(std::begin(address_.bytes), std::end(address_.bytes), door.address);
    return p2pkv::to_blob(door);  // its token and the key are zeros
  }

 private:
  void run() {
    for (;;) {
      pollfd waiting{listener_.get(), POLLIN, 0};
      poll(&waiting, 1, -1);
      UniqueFd connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!connection) {
        if ((waiting.revents & (POLLHUP | POLLERR)) != 0) return;
        continue;
      }
      p2pkv::Hello hello;
      if (recv(connection.get(), &hello, sizeof hello, MSG_WAITALL) != sizeof hello) continue;
      SealedStream stream(std::move(connection), {}, Side::kOwner);
      while (answer(stream)) {
      }
    }
  }

  bool answer(SealedStream& stream) {
    auto progress = stream.receive();
    if (progress == SealedStream::Progress::kBlocked) {
      wait_for(stream, POLLIN, 1000);
      progress = stream.receive();
    }
    if (progress != SealedStream::Progress::kFrame) return progress == SealedStream::Progress::kBlocked;
    wire::Reader body(stream.message());
    const auto asked = body.value<wire::Header>();
    if (!asked) return false;
    // The opening question, for nothing, has a right answer, so that the channel is there; and every second
    // time one of an owner that does not know LOCATE.
    const bool is_opening = asked->count == 0;
    if (is_opening && numbers_.once_in(2)) {
      std::string malformed;
      wire::append(malformed, wire::make_reply(*asked, wire::ReplyStatus::kMalformed, kBoot, 0));
      stream.put(malformed, {});
      return stream.flush();
    }
    for (uint64_t n = is_opening ? 1 : numbers_.once_in(8) ? numbers_.below(3) : 1; n > 0; --n)
      stream.put(is_opening ? right_answer(*asked, body.rest()) : anything(*asked, body.rest()), {});
    return stream.flush() && (is_opening || !numbers_.once_in(30));
  }

  static std::string right_answer(const wire::Header& asked, std::string_view keys) {
    std::string message;
    wire::append(message, wire::make_reply(asked, wire::ReplyStatus::kOk, kBoot, asked.count));
    message.append(asked.count, '\1');
    std::vector<Location> locations(asked.count);
    for (uint32_t i = 0; i < asked.count; ++i) {
      locations[i].owner = kOwner;
      locations[i].offset = static_cast<uint8_t>(keys[i * sizeof(Key)]) * uint64_t{4096};
      if (asked.kind == static_cast<uint16_t>(Kind::kGet)) wire::append(message, locations[i]);
    }
    if (asked.kind != static_cast<uint16_t>(Kind::kGet)) p2pkv::append_columns(locations, &message);
    return message;
  }

  std::string anything(const wire::Header& asked, std::string_view keys) {
    std::string message = right_answer(asked, keys);
    if (numbers_.once_in(3)) return message;
    wire::Header header = wire::make_reply(asked, wire::ReplyStatus::kOk, kBoot, asked.count);
    switch (numbers_.below(6)) {
      case 0:
        header.count = numbers_.u32();
        break;
      case 1:
        header.request_id = numbers_.u64();
        break;
      case 2:
        header.status = numbers_.u32();
        break;
      case 3:
        header.boot = numbers_.u64();
        break;
      case 4:  // one found more or less than there are locations of
        message[sizeof header + numbers_.below(asked.count)] = static_cast<char>(numbers_.u32());
        break;
      default:
        message.resize(sizeof header + numbers_.below(message.size() - sizeof header + 1));
    }
    std::memcpy(message.data(), &header, sizeof header);
    if (numbers_.once_in(8)) message += numbers_.text(2000);
    p2pkv::test::spoil(numbers_, &message);
    return message;
  }

  Numbers numbers_;
  Address address_;
  UniqueFd listener_;
  std::thread thread_;
};

}  // namespace

TEST(directory_server_of_a_hostile_member_answers_the_others) {
  const uint64_t seed = p2pkv::test::seed("hostile reader");
  Served served;
  served.server->serve_promotions(std::make_shared<EmptyPromoter>());
  const auto keys = keys_from(1, 60);
  const auto channel = served.channel();
  CHECK(tell(channel, Kind::kPut, keys, 1));
  std::atomic<bool> is_over = false;
  std::thread speaker([&] {
    Numbers numbers(seed);
    ask_anything(served, numbers, is_over);
  });
  const auto requests = [&served] { return served.server->stats().requests; };
  for (uint64_t i = 0; i < 40; ++i) {
    const uint64_t before = requests();
    while (requests() < before + 20) std::this_thread::yield();
    const Answer answer = look_up(channel, keys);
    CHECK(answer.is_usable);
    CHECK_EQ(answer.n_found, keys.size());
  }
  is_over = true;
  speaker.join();
}

TEST(directory_channel_to_a_lying_owner_ends_every_call) {
  const Liar liar(p2pkv::test::seed("lying owner"));
  p2pkv::test::ZmqContext loads_the_library;
  std::string error;
  const auto keys = keys_from(1, 20);
  std::shared_ptr<DirectoryChannel> channel;
  size_t n_answered = 0;
  for (int i = 0; i < 400; ++i) {
    if (!channel) channel = DirectoryChannel::open(liar.door(), kBoot, 10.0, &error);
    CHECK(channel != nullptr);
    if (!channel) return;
    std::vector<uint8_t> found(keys.size());
    std::vector<Location> locations(keys.size());
    AskBatch batch(keys.data(), keys.size(), nullptr, ring_of_one());
    const auto usable =
        ask(batch,
            {i % 2 == 0 ? Kind::kGet : Kind::kHeld, reinterpret_cast<const uint8_t*>(keys.data()),
             sizeof(Key), found.data(), locations.data()},
            channel, 0.05);
    n_answered += batch.asks().front().is_answered ? 1 : 0;
    for (const uint8_t flag : found) CHECK(flag <= 1);
    if (usable.front() == 0) channel.reset();
  }
  CHECK(n_answered > 0);
}

TEST(ask_batch_takes_no_answer_of_another_length) {
  Numbers numbers(p2pkv::test::seed("answers"));
  const auto keys = keys_from(1, 5);
  size_t n_whole = 0;
  for (int i = 0; i < 2000; ++i) {
    AskBatch batch(keys.data(), keys.size(), nullptr, ring_of_one());
    const size_t ask = batch.seal();
    std::string reply;
    size_t n_flags = 0;
    for (size_t row = 0; row < keys.size(); ++row) {
      reply += static_cast<char>(numbers.below(2));
      n_flags += reply.back() != 0 ? 1 : 0;
    }
    const size_t whole = reply.size() + n_flags * sizeof(Location);
    reply.resize(numbers.once_in(3) ? whole : numbers.below(6 * sizeof(Location)));
    reply.shrink_to_fit();  // so that reading behind it is seen
    std::vector<uint8_t> found(keys.size());
    std::vector<Location> locations(keys.size());
    const bool is_taken = batch.take_found(ask, reply, found.data(), locations.data());
    // one that is cut among its flags tells of fewer
    const bool is_whole = reply.size() == whole;
    CHECK_EQ(is_taken, is_whole);
    CHECK_EQ(std::count(found.begin(), found.end(), 1), static_cast<std::ptrdiff_t>(is_taken ? n_flags : 0));
    n_whole += is_whole ? 1 : 0;
  }
  CHECK(n_whole > 0);
}

// Locations of one owner's pages, of all kinds, or of nothing that makes sense.
std::vector<Location> some_locations(Numbers& numbers) {
  const bool is_sensible = !numbers.once_in(3);
  std::vector<Location> locations(numbers.below(40));
  for (Location& location : locations) {
    uint64_t words[sizeof(Location) / sizeof(uint64_t)];
    for (uint64_t& word : words) word = numbers.u64();
    std::memcpy(static_cast<void*>(&location), words, sizeof location);
    if (!is_sensible) continue;
    location.owner = kOwner;
    location.boot = kBoot;
    location.offset = numbers.below(1 << 20) * 4096;
    location.length = 256 << 10;
    location.word_offset = location.offset / 512;
    location.generation = 0xfedc'ba98'0000'0000 + 2 * numbers.below(1000);
    location.region = 0;
    location.flags = p2pkv::kResident;
  }
  return locations;
}

TEST(columns_of_locations_come_back_as_they_were_or_not_at_all) {
  Numbers numbers(p2pkv::test::seed("location columns"));
  for (int i = 0; i < 4000; ++i) {
    const std::vector<Location> locations = some_locations(numbers);
    std::string columns;
    p2pkv::append_columns(locations, &columns);
    columns.shrink_to_fit();  // so that reading behind it is seen
    std::vector<Location> taken;
    CHECK(p2pkv::take_columns(columns, locations.size(), &taken));
    CHECK_EQ(taken.size(), locations.size());
    CHECK(locations.empty() ||
          std::memcmp(taken.data(), locations.data(), locations.size() * sizeof(Location)) == 0);
    CHECK(!p2pkv::take_columns(columns + '\0', locations.size(), &taken));
    if (columns.empty()) continue;
    CHECK(!p2pkv::take_columns(std::string_view(columns).substr(0, numbers.below(columns.size())),
                               locations.size(), &taken));
    // Whatever it says, nothing is read behind its end.
    p2pkv::test::spoil(numbers, &columns);
    columns.shrink_to_fit();
    p2pkv::take_columns(columns, numbers.below(60), &taken);
  }
}

TEST(columns_of_like_pages_are_short) {
  Numbers numbers(p2pkv::test::seed("like pages"));
  std::vector<Location> locations(256);
  for (size_t i = 0; i < locations.size(); ++i) {
    locations[i] = {kOwner,        kBoot, i << 18,         256 << 10, i << 9, 0xfedc'ba98'0000'0000 + 2 * i,
                    numbers.u64(), 0,     p2pkv::kResident};
  }
  std::string columns;
  p2pkv::append_columns(locations, &columns);
  CHECK(columns.size() < locations.size() * 20);
}
