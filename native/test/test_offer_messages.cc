// What comes over links may be anything: parsers give what is in bounds, or nothing; and a member that says
// what it likes has no row of anybody else's.
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/checked.h"
#include "check.h"
#include "link_peers.h"
#include "offers/offer_messages.h"
#include "offers/shares.h"
#include "rogue_link.h"
#include "seed.h"
#include "transports/transports.h"
#include "zmq_library.h"

namespace {

using p2pkv::Deadline;
using p2pkv::RowSpan;
using p2pkv::RowStatus;
using p2pkv::Transfers;
using p2pkv::offers::Kind;
using p2pkv::test::Numbers;
using p2pkv::test::RogueLink;
namespace offers = p2pkv::offers;
namespace wire = p2pkv::wire;

// Wide enough for every sum of what a message can say.
using Wide = unsigned __int128;

constexpr uint64_t kRow = 4096;

bool is_in_bounds(const offers::OfferMessage& message) {
  Wide total = 0;
  bool is_right = message.rows.size() == message.record.n_rows && !message.rows.empty();
  for (const offers::RowRecord& row : message.rows) {
    is_right &= row.length > 0 && Wide{row.offset} + row.length <= Wide{INT64_MAX};
    total += (Wide{row.length} + offers::kRowAlignment - 1) / offers::kRowAlignment * offers::kRowAlignment;
  }
  return is_right && total == message.padded_nbytes && total <= Wide{INT64_MAX} && !message.name.empty() &&
         message.name.size() <= Transfers::kMaxRequestName &&
         Wide{message.record.first_row} + message.record.n_rows <= Wide{UINT32_MAX};
}

// An honest node: a receive buffer and memory of its own.
struct Node {
  Node(uint64_t key, uint64_t buffer_nbytes) : memory(64 * kRow) {
    std::string error;
    transport = p2pkv::make_tcp_transport({}, &error);
    Transfers::Options options;
    options.ways = {{0, "tcp", transport}};
    options.peers = peers;
    options.buffer_nbytes = buffer_nbytes;
    transfers = Transfers::start(std::move(options), &error);
    CHECK(transfers != nullptr);
    transfers->announce(key, 1);
    region = transport->register_memory(memory.data(), memory.size(), -1, true, &error);
    transfers->add_memory(reinterpret_cast<uint64_t>(memory.data()), memory.size(), true, {region},
                          {region->describe()});
  }
  ~Node() {
    transfers->close();
    peers->close();
    transport->close();
  }
  p2pkv::Rows row(const std::string& request, size_t at) const {
    return {
        request, 0, {{static_cast<int64_t>(reinterpret_cast<uint64_t>(memory.data()) + at * kRow), kRow}}};
  }
  bool holds(size_t at, uint8_t value) const {
    return std::all_of(memory.begin() + static_cast<ptrdiff_t>(at * kRow),
                       memory.begin() + static_cast<ptrdiff_t>((at + 1) * kRow),
                       [value](uint8_t byte) { return byte == value; });
  }
  void fill(size_t at, uint8_t value) { std::memset(memory.data() + at * kRow, value, kRow); }

  std::vector<uint8_t> memory;
  std::shared_ptr<p2pkv::Transport> transport;
  const std::shared_ptr<p2pkv::PeerConnections> peers = p2pkv::test::peers_of_links(1);
  std::shared_ptr<Transfers> transfers;
  std::shared_ptr<p2pkv::MemoryRegion> region;
};

// Answers what the node asks to read the rogue's memory: mostly right, so that its bytes are really pulled.
void answer(RogueLink& link, Numbers& numbers, const Node& rogue, const wire::Header& header,
            const std::string& body) {
  const auto kind = static_cast<uint16_t>(header.kind | static_cast<uint16_t>(wire::Kind::kReply));
  if (header.kind == static_cast<uint16_t>(Kind::kReach)) {
    std::string ways;
    wire::append(ways, numbers.once_in(8) ? numbers.u32() : uint32_t{1});
    offers::append_text(ways, "tcp");
    offers::append_text(ways, rogue.transport->domain());
    offers::append_text(ways, numbers.once_in(8) ? numbers.text(40) : rogue.region->describe());
    link.send(kind, ways, 1, header.request_id);
  } else if (header.kind == static_cast<uint16_t>(Kind::kJoin)) {
    std::string error;
    wire::Reader reader(body);
    const auto name = offers::take_text(reader, 64);
    const std::string half = name ? rogue.transport->accept(reader.rest(), &error) : "";
    link.send(kind, numbers.once_in(8) ? numbers.text(64) : half, 1, header.request_id);
  } else if (header.kind == static_cast<uint16_t>(Kind::kPulled)) {
    wire::Reader reader(body);
    const auto record = reader.value<offers::PulledRecord>();
    std::string verdict;
    wire::append(verdict, offers::SettledRecord{record ? record->offer : 0, numbers.once_in(3) ? 0u : 1u, 0});
    link.send(static_cast<uint16_t>(Kind::kSettled), verdict);
  }
}

std::string make_message(Numbers& numbers, Kind kind) {
  const std::string name = numbers.once_in(3) ? "the honest one's" : "rogue";
  std::string out;
  switch (kind) {
    case Kind::kOffer:
      return p2pkv::test::make_offer(numbers, name, kRow);
    case Kind::kAsk:
      wire::append(out, offers::AskRecord{numbers.below(8), numbers.u32(), numbers.u32(), numbers.u32(),
                                          static_cast<uint32_t>(name.size())});
      return out + name;
    case Kind::kPulled:
      wire::append(out, offers::PulledRecord{numbers.u64(), static_cast<uint32_t>(numbers.below(4)), 0});
      return out + numbers.text(4);
    case Kind::kSettled:
      wire::append(out, offers::SettledRecord{numbers.below(40), numbers.u32(), 0});
      return out;
    case Kind::kGone:
      wire::append(out, offers::GoneRecord{numbers.below(8), numbers.u32(), numbers.u32()});
      return out;
    case Kind::kAskEnd:
    case Kind::kWithdrawn:
      wire::append(out, numbers.below(40));
      return out;
    default:
      return numbers.text(64);
  }
}

void speak(Node& node, const Node& rogue, Numbers& numbers, const std::atomic<bool>& is_over) {
  static constexpr Kind kKinds[] = {Kind::kOffer,  Kind::kOffer,  Kind::kOffer,     Kind::kAsk,
                                    Kind::kAskEnd, Kind::kPulled, Kind::kSettled,   Kind::kWithdrawn,
                                    Kind::kReach,  Kind::kJoin,   Kind::kIntroduce, Kind::kGone};
  for (uint64_t key = 100; !is_over; ++key) {
    RogueLink link(*node.transfers, key);
    bool is_open = true;
    for (uint64_t left = 1 + numbers.below(40); is_open && left > 0 && !is_over; --left) {
      const Kind kind = kKinds[numbers.below(std::size(kKinds))];
      std::string message = make_message(numbers, kind);
      p2pkv::test::spoil(numbers, &message);
      const auto number = static_cast<uint16_t>(numbers.once_in(30) ? numbers.u32() : uint32_t(kind));
      is_open = link.send(number, message, numbers.once_in(20) ? numbers.u32() : 1, numbers.below(9));
      wire::Header header;
      std::string body;
      int received = 0;
      while (is_open && (received = link.receive(1, &header, &body)) > 0)
        answer(link, numbers, rogue, header, body);
      is_open &= received >= 0;
    }
  }
}

}  // namespace

TEST(offer_messages_are_in_bounds_or_nothing) {
  Numbers numbers(p2pkv::test::seed("offer messages"));
  size_t n_taken = 0;
  size_t n_refused = 0;
  for (int i = 0; i < 200'000; ++i) {
    std::string message = p2pkv::test::make_offer(numbers, "a request", kRow);
    p2pkv::test::spoil(numbers, &message);
    // In memory of its very size, so that the sanitizers see a byte that is read beyond it.
    const auto exact = std::make_unique<char[]>(message.size());
    std::copy(message.begin(), message.end(), exact.get());
    wire::Reader body({exact.get(), message.size()});
    const auto taken = offers::take_offer(body);
    ++(taken ? n_taken : n_refused);
    if (taken) CHECK(is_in_bounds(*taken));
    wire::Reader again({exact.get(), message.size()});
    if (const auto ask = offers::take_ask(again))
      CHECK(Wide{ask->record.first_row} + ask->record.n_rows <= Wide{UINT32_MAX} && !ask->name.empty());
    wire::Reader third({exact.get(), message.size()});
    if (const auto pulled = offers::take_pulled(third))
      CHECK_EQ(pulled->statuses.size(), size_t{pulled->record.n_rows});
    if (const auto ways = offers::take_ways(wire::Reader({exact.get(), message.size()})))
      CHECK(ways->size() <= 16);
  }
  CHECK(n_taken > 10'000);
  CHECK(n_refused > 10'000);
}

TEST(offer_messages_whose_lengths_wrap_are_nothing) {
  const uint64_t big = 1 << 20;
  for (const uint64_t second : {UINT64_MAX - big + 4097, UINT64_MAX - 62, uint64_t{INT64_MAX}, uint64_t{0}}) {
    std::string message;
    wire::append(message, offers::OfferRecord{1, 0, 1000, 0, 2, 1});
    message += "r";
    wire::append(message, offers::RowRecord{5, 0, 0, big});
    wire::append(message, offers::RowRecord{5, 0, 0, second});
    wire::Reader body(message);
    CHECK(!offers::take_offer(body));
  }
}

TEST(offers_of_a_hostile_member_harm_no_other_rows) {
  const uint64_t seed = p2pkv::test::seed("hostile member");
  p2pkv::test::ZmqContext loads_the_library;
  Node receiver(1, 256 << 10);
  Node producer(2, 0);
  Node rogue(3, 0);
  for (size_t at = 0; at < 64; ++at) rogue.fill(at, 0xEE);
  std::string error;
  CHECK(producer.transfers->connect(1, 1, receiver.transfers->accept(Transfers::request(), &error), 10.0,
                                    &error));
  std::atomic<bool> is_over = false;
  std::thread speaker([&] {
    Numbers numbers(seed);
    speak(receiver, rogue, numbers, is_over);
  });
  size_t n_right = 0;
  Numbers numbers(seed + 1);
  for (int i = 0; i < 150; ++i) {
    // Half of them come before their grant, and wait where the rogue's do.
    const std::string request = numbers.once_in(8) ? "the honest one's" : "honest " + std::to_string(i);
    const auto value = static_cast<uint8_t>(1 + i % 200);
    producer.fill(0, value);
    receiver.fill(0, 0);
    const auto offer = producer.transfers->offer(1, producer.row(request, 0), Deadline::after(0.3), &error);
    if (!offer) continue;
    if (numbers.once_in(2)) offer->wait(Deadline::after(0.05));
    const auto grant =
        receiver.transfers->grant(std::nullopt, receiver.row(request, 0), Deadline::after(0.3), &error);
    if (grant) {
      grant->wait(Deadline::after(10.0));
      grant->revoke(RowStatus::kCanceled);
      // Under a name that both use a row may be either's; it is all of one.
      const bool is_rogues = request[0] == 't' && receiver.holds(0, 0xEE);
      if (grant->statuses()[0] == RowStatus::kOk) {
        CHECK(receiver.holds(0, value) || is_rogues);
        ++n_right;
      }
    }
    offer->withdraw(RowStatus::kRejected);
  }
  is_over = true;
  speaker.join();
  CHECK(n_right > 0);
}

TEST(shares_of_many_links_are_bounded_and_fair) {
  const auto shares = std::make_shared<offers::Shares>(1000);
  std::vector<std::shared_ptr<const void>> greedy;
  while (auto share = shares->take(1, 10)) greedy.push_back(std::move(share));
  CHECK_EQ(greedy.size(), size_t{100});
  std::vector<std::shared_ptr<const void>> modest;
  while (auto share = shares->take(2, 10)) modest.push_back(std::move(share));
  CHECK_EQ(modest.size(), size_t{50});
  CHECK(shares->take(1, 10) == nullptr);
  greedy.clear();
  CHECK(shares->take(2, 10) != nullptr);
}

TEST(checked_arithmetic_sees_every_wrap) {
  CHECK(p2pkv::checked_sum(UINT64_MAX, 0) == UINT64_MAX);
  CHECK(!p2pkv::checked_sum(UINT64_MAX, 1));
  CHECK(p2pkv::checked_padded(65, 64) == uint64_t{128});
  CHECK(!p2pkv::checked_padded(UINT64_MAX - 62, 64));
  CHECK(p2pkv::lies_within(0, 8, 8) && !p2pkv::lies_within(1, 8, 8));
  CHECK(!p2pkv::lies_within(UINT64_MAX, 2, 100) && !p2pkv::lies_within(2, UINT64_MAX, 100));
  CHECK(p2pkv::word_lies_within(0, 8) && !p2pkv::word_lies_within(4, 100) && !p2pkv::word_lies_within(0, 7));
}
