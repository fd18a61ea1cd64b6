// The native transports against themselves, in one process: what the sanitizers should see.
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/copy.h"
#include "base/copy_team.h"
#include "check.h"
#include "net/tokens.h"
#include "transport_pair.h"
#include "transports/transports.h"

using namespace p2pkv;

namespace {

std::shared_ptr<Transport> make_transport(bool is_shm) {
  std::string error;
  return is_shm ? make_shm_transport(&error) : make_tcp_transport({}, &error);
}

constexpr uint64_t kPages = 48;  // enough for the second tcp stream to be used

struct Pair : test::TransportPair<64 * 1024, kPages> {
  explicit Pair(bool is_shm) : TransportPair(make_transport(is_shm), make_transport(is_shm)) {}
};

void read_pages(bool is_shm) {
  Pair pair(is_shm);
  auto endpoint = pair.connect();
  const std::vector<uint64_t> words(kPages, 2);
  for (int round = 0; round < 20; ++round) {
    auto transfer = pair.read(*endpoint, words);
    transfer->wait(20);
    for (const Status status : transfer->statuses()) CHECK(status == Status::kOk);
  }
  for (uint64_t page = 0; page < kPages; ++page) CHECK(pair.holds(page, 2));
  endpoint->close();
}

void read_while_rewritten(bool is_shm) {
  Pair pair(is_shm);
  auto endpoint = pair.connect();
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t word = 4; !stop; word += 2) {
      for (uint64_t page = 0; page < kPages && !stop; ++page) {
        pair.rewrite(page, word);
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
  });
  size_t n_ok = 0, n_rejected = 0;
  for (int round = 0; round < 100; ++round) {
    std::vector<uint64_t> words;
    for (uint64_t page = 0; page < kPages; ++page) words.push_back(load_word(pair.memory->base() + page * 8));
    auto transfer = pair.read(*endpoint, words);
    transfer->wait(20);
    for (uint64_t page = 0; page < kPages; ++page) {
      const Status status = transfer->statuses()[page];
      CHECK(status == Status::kOk || status == Status::kRejected);
      if (status == Status::kRejected) ++n_rejected;
      if (status != Status::kOk || !is_committed(words[page])) continue;
      ++n_ok;
      CHECK(pair.holds(page, words[page]));
    }
  }
  stop = true;
  writer.join();
  std::printf("  %zu ok, %zu rejected\n", n_ok, n_rejected);
  CHECK(n_ok > 0);
  endpoint->close();
}

void close_during_wait(bool is_shm) {
  Pair pair(is_shm);
  const std::vector<uint64_t> words(kPages, 2);
  for (int round = 0; round < 40; ++round) {
    auto endpoint = pair.connect();
    auto transfer = pair.read(*endpoint, words);
    std::thread waiting([&] { transfer->wait(20); });
    std::thread polling([&] {
      while (!transfer->done()) std::this_thread::yield();
    });
    std::this_thread::sleep_for(std::chrono::microseconds(round * 30));
    if (round % 3 == 0) pair.region->describe();
    endpoint->close();
    std::memset(pair.bytes.data(), 0x11, Pair::kBytes);  // the caller's again
    waiting.join();
    polling.join();
    for (const Status status : transfer->statuses())
      CHECK(status == Status::kOk || status == Status::kCanceled);
    for (const uint8_t byte : pair.bytes) CHECK(byte == 0x11);
  }
}

void close_region_during_reads(bool is_shm) {
  for (int round = 0; round < 10; ++round) {
    Pair pair(is_shm);
    auto endpoint = pair.connect();
    const std::vector<uint64_t> words(kPages, 2);
    std::thread reading([&] {
      for (bool is_open = true; is_open;) {
        auto transfer = pair.read(*endpoint, words);
        transfer->wait(20);
        for (const Status status : transfer->statuses()) is_open &= status == Status::kOk;
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(500 * round));
    pair.region->close();
    if (!is_shm) pair.memory.reset();  // no thread of the owner touches it any more; the sanitizers would see
    reading.join();
    endpoint->close();
  }
}

}  // namespace

TEST(shm_reads_pages) {
  read_pages(true);
}
TEST(tcp_reads_pages) {
  read_pages(false);
}
TEST(shm_reads_while_rewritten) {
  read_while_rewritten(true);
}
TEST(tcp_reads_while_rewritten) {
  read_while_rewritten(false);
}
TEST(shm_closes_during_wait) {
  close_during_wait(true);
}
TEST(tcp_closes_during_wait) {
  close_during_wait(false);
}
TEST(shm_closes_region_during_reads) {
  close_region_during_reads(true);
}
TEST(tcp_closes_region_during_reads) {
  close_region_during_reads(false);
}

// Every batch is shared with the helper: neither a word nor an end may come before it is done.
TEST(shm_reads_while_rewritten_by_two_threads) {
  const auto team = CopyTeam::hire(CopyTeam::Zeal::kAlways);
  read_while_rewritten(true);
}
TEST(shm_closes_during_wait_for_two_threads) {
  const auto team = CopyTeam::hire(CopyTeam::Zeal::kAlways);
  close_during_wait(true);
}
TEST(shm_closes_region_during_reads_by_two_threads) {
  const auto team = CopyTeam::hire(CopyTeam::Zeal::kAlways);
  close_region_during_reads(true);
}

TEST(tokens_admit_once) {
  TokenTable tokens;
  const Token secret{1, 2, 3};
  const Token token = tokens.mint(7, secret);
  uint64_t grant = 0;
  Token told{};
  Token wrong = token;
  wrong[31] ^= 1;
  CHECK(!tokens.redeem(wrong, &grant));
  CHECK(tokens.redeem(token, &grant, &told));
  CHECK_EQ(grant, uint64_t{7});
  CHECK(told == secret);
  CHECK(!tokens.redeem(token, &grant));
  const Token revoked = tokens.mint(8);
  tokens.revoke(8);
  CHECK(!tokens.redeem(revoked, &grant));
}

TEST(tokens_are_bounded_and_the_oldest_goes_first) {
  TokenTable tokens;
  const Token first = tokens.mint(1);
  Token last{};
  for (size_t i = 0; i < TokenTable::kMaxOutstanding; ++i) last = tokens.mint(2);
  CHECK_EQ(tokens.outstanding(), TokenTable::kMaxOutstanding);
  uint64_t grant = 0;
  CHECK(!tokens.redeem(first, &grant));
  CHECK(tokens.redeem(last, &grant));
}
