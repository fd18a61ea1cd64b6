// Pages over tcp, encrypted: somebody on the wire reads nothing of them, and what he changes is no page.
#include <algorithm>
#include <cstring>
#include <random>

#include "base/clock.h"
#include "check.h"
#include "meddler.h"
#include "net/libcrypto.h"
#include "relay.h"
#include "seed.h"
#include "transports/tcp/frames.h"
#include "transports/transports.h"

using namespace p2pkv;
using p2pkv::test::Meddler;
using p2pkv::test::Meddling;

namespace {

constexpr uint64_t kTable = 4096;
constexpr uint64_t kPages = 12;
constexpr uint64_t kPage = 40'000;  // so that records end within pages
constexpr uint64_t kBytes = kTable + kPages * kPage;
constexpr char kSecret[] = "what is on this page is nobody's";
constexpr uint64_t kRekeyAfter = 150'000;  // so that keys change within a batch
constexpr double kEnough = 60, kSoon = 15, kShort = 0.3;

double seconds_since(Deadline::Clock::time_point began) {
  return std::chrono::duration<double>(Deadline::Clock::now() - began).count();
}

std::shared_ptr<TcpTransportBase> transport(bool encrypts) {
  std::string error;
  TcpOptions options;
  options.streams = 1;
  options.encrypts = encrypts;
  options.rekey_after = kRekeyAfter;
  auto made = make_tcp_transport(options, &error);
  if (!made) std::cout << error << std::endl;
  CHECK(made);
  return made;
}

struct Ends {
  explicit Ends(bool encrypts)
      : owner(transport(encrypts)), reader(transport(encrypts)), memory(kBytes), bytes(kBytes) {
    for (uint64_t at = kTable; at + 40 <= kBytes; at += 40) {
      std::memcpy(memory.data() + at, kSecret, 32);
      std::memcpy(memory.data() + at + 32, &at, 8);
    }
    auto* words = reinterpret_cast<uint64_t*>(memory.data());
    for (uint64_t page = 0; page < kPages; ++page) words[page] = 2;
    std::string error;
    region = owner->register_memory(memory.data(), kBytes, -1, true, &error);
    local = reader->register_memory(bytes.data(), kBytes, -1, false, &error);
  }

  std::shared_ptr<Endpoint> connect(const std::function<std::string(std::string)>& change) {
    std::string error;
    auto endpoint = reader->open();
    CHECK(endpoint->bind(change(owner->accept(endpoint->describe(), &error)), &error));
    remote = endpoint->attach(region->describe(), &error);
    return endpoint;
  }

  // How many pages came. Each that did is looked at, byte by byte, and of the others whether anything landed
  // that is not the owner's.
  uint64_t read(Endpoint& endpoint, double timeout) {
    std::memset(bytes.data(), 0xee, bytes.size());
    std::vector<Span> spans;
    std::vector<Word> words;
    for (uint64_t page = 0; page < kPages; ++page) {
      const auto at = static_cast<int64_t>(kTable + page * kPage);
      spans.push_back({at, at, static_cast<int64_t>(kPage)});
      words.push_back({page * 8, 2});
    }
    const auto transfer = endpoint.read(local, remote, spans, words);
    transfer->wait(timeout);
    uint64_t n_good = 0;
    for (uint64_t page = 0; page < kPages; ++page) {
      const uint64_t at = kTable + page * kPage;
      if (transfer->statuses()[page] == Status::kOk) {
        ++n_good;
        CHECK(std::memcmp(bytes.data() + at, memory.data() + at, kPage) == 0);
      }
      bool is_clean = true;
      for (uint64_t i = at; i < at + kPage; ++i) is_clean &= bytes[i] == memory[i] || bytes[i] == 0xee;
      CHECK(is_clean);
    }
    return n_good;
  }

  uint64_t n_forged() const { return owner->n_forged() + reader->n_forged(); }

  std::shared_ptr<TcpTransportBase> owner, reader;
  std::vector<uint8_t> memory, bytes;
  std::shared_ptr<MemoryRegion> region, local;
  std::shared_ptr<RemoteRegion> remote;
};

// Reads through somebody who does as planned, until that has shown; what must be so is checked.
void meddle(Ends& ends, const Meddler::Plan& plan) {
  const bool may_wait_in_vain =
      plan.what == Meddling::kFlipLength || plan.what == Meddling::kLeaveOut || plan.what == Meddling::kSwap;
  const double timeout = may_wait_in_vain ? kShort : kEnough;
  const uint64_t n_forged = ends.n_forged();
  std::unique_ptr<Meddler> meddler;
  const auto endpoint = ends.connect([&](std::string half) {
    tcp::EndpointBlob blob;
    std::memcpy(&blob, half.data(), sizeof blob);
    meddler = std::make_unique<Meddler>(blob.port, plan, kSecret);
    return test::through(std::move(half), {meddler->port()});
  });
  uint64_t n_good = kPages;
  for (int i = 0; i < 4 && n_good == kPages; ++i) {
    const auto began = Deadline::Clock::now();
    n_good = ends.read(*endpoint, timeout);
    CHECK(seconds_since(began) < timeout + 10);
  }
  CHECK(!meddler->has_read_secret());
  if (!meddler->has_meddled()) {
    // He did not get to it, or had nothing to put in its place. A short time may be too short for all pages.
    CHECK(n_good == kPages || may_wait_in_vain);
  } else {
    CHECK(n_good < kPages);
    CHECK_EQ(ends.read(*endpoint, kEnough), 0u);  // the connection has ended, for good
  }
  // What waits in vain may be given up before it is seen what was done, and an end is an end.
  if (n_good < kPages && meddler->has_meddled() && !may_wait_in_vain && plan.what != Meddling::kCut) {
    const auto began = Deadline::Clock::now();
    while (ends.n_forged() == n_forged && seconds_since(began) < kSoon) std::this_thread::yield();
    CHECK(ends.n_forged() > n_forged);
  }
  endpoint->close();
}

}  // namespace

TEST(tcp_encryption_shows_what_is_meddled_with) {
  std::mt19937_64 random(test::seed("tcp_encryption_shows_what_is_meddled_with"));
  Ends ends(true);
  // Of the reader a request has two records; of the owner an answer has a header, ten of bytes or so, and a
  // trailer. Each thing is done once to either at least.
  for (int what = 0; what <= static_cast<int>(Meddling::kCut); ++what) {
    for (size_t direction = 0; direction < 2; ++direction) {
      const size_t number = random() % (direction == 0 ? 4 : 24);
      meddle(ends, {static_cast<Meddling>(what), direction, number, random()});
    }
  }
  // Where both directions had one key, the first record of one would open as the first of the other.
  meddle(ends, {Meddling::kReflect, 1, 0, 0});
}

TEST(tcp_encryption_is_seen_where_it_is_not) {
  Ends ends(false);
  std::unique_ptr<Meddler> meddler;
  const auto endpoint = ends.connect([&](std::string half) {
    tcp::EndpointBlob blob;
    std::memcpy(&blob, half.data(), sizeof blob);
    meddler = std::make_unique<Meddler>(blob.port, Meddler::Plan{}, kSecret);
    return test::through(std::move(half), {meddler->port()});
  });
  ends.read(*endpoint, kEnough);
  CHECK(meddler->has_read_secret());
  endpoint->close();
}

TEST(tcp_encryption_wants_it_of_both) {
  Ends plain(false), sealed(true);
  std::string error;
  CHECK(plain.owner->accept(sealed.reader->open()->describe(), &error).empty());
  CHECK(error.find("its peer encrypts tcp and this node does not") != std::string::npos);
  CHECK(sealed.owner->accept(plain.reader->open()->describe(), &error).empty());
  CHECK(error.find("this node encrypts tcp and its peer does not") != std::string::npos);
  const std::string of_plain = plain.owner->accept(plain.reader->open()->describe(), &error);
  const std::string of_sealed = sealed.owner->accept(sealed.reader->open()->describe(), &error);
  CHECK(!sealed.reader->open()->bind(of_plain, &error));
  CHECK(error.find("set encrypt: tcp on both") != std::string::npos);
  CHECK(!plain.reader->open()->bind(of_sealed, &error));
  CHECK(plain.owner->domain() != sealed.owner->domain());
}

TEST(tcp_encryption_has_no_two_records_alike) {
  CHECK(LibCrypto::missing().empty());
  CipherKey session{};
  const Hello hello{tcp::kHelloMagic, kFrameVersion, 0, {}};
  const CipherKey key = connection_key(session, hello, Sender::kReader);
  CHECK(key != connection_key(session, hello, Sender::kOwner));
  // Each bit of what goes unsealed makes another key.
  for (size_t bit = 0; bit < sizeof hello * 8; ++bit) {
    Hello other = hello;
    reinterpret_cast<uint8_t*>(&other)[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    CHECK(key != connection_key(session, other, Sender::kReader));
  }
  RecordSealer sealer(key, 100);
  std::vector<std::vector<uint8_t>> records;
  std::vector<uint8_t> text(60, 'x');
  for (int i = 0; i < 9; ++i) {
    records.emplace_back();
    CHECK(sealer.seal_all(text.data(), text.size(), &records.back()));
    CHECK_EQ(std::count(records.begin(), records.end(), records.back()), 1);
  }
  RecordOpener opener(key, 100);
  for (std::vector<uint8_t> record : records) {
    CHECK(opener.open(record.data()));
    CHECK(std::equal(text.begin(), text.end(), record.begin() + RecordCipher::kLengthBytes));
  }
  RecordOpener unchanging(key, 1000);
  for (size_t i = 0; i < 3; ++i) {
    std::vector<uint8_t> record = records[i];
    CHECK(unchanging.open(record.data()) == (i < 2));  // after more than 100 bytes there is another key
  }
  RecordOpener late(key, 100);
  std::vector<uint8_t> first = records[0], second = records[1];
  CHECK(!late.open(second.data()));
  CHECK(!late.open(first.data()));  // and nothing after that
}
