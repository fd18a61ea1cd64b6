// What one engine may take of its host's node: its share of the pool, and requests under way.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "attach/engine_line.h"
#include "attach/turns.h"
#include "hosts_node.h"
#include "net/packets.h"
#include "page/region.h"

namespace {

using p2pkv::attaching::EngineLine;
using p2pkv::attaching::Turns;
using p2pkv::attaching::Welcome;

// An engine that opens as many lines as it likes: one of a version that has not heard of a limit.
struct Heedless {
  explicit Heedless(const std::string& at) : path(at), connection(p2pkv::attaching::knock(path, &error)) {
    const p2pkv::attaching::Hello hello{p2pkv::attaching::kHelloMagic, p2pkv::attaching::kVersion,
                                        static_cast<uint16_t>(p2pkv::attaching::Purpose::kEngine), 0, 0};
    UniqueFd area;
    CHECK(p2pkv::attaching::greet(connection.get(), hello, -1, Deadline::after(30), &welcome, &area, &error));
  }
  std::unique_ptr<EngineLine> open_line() {
    return EngineLine::open(path, welcome, Deadline::after(30), &error);
  }
  // Asks for something on a line of its own and closes that, without having waited, or taken it back. False,
  // with the reason in `error`, where it has no line.
  bool ask_and_leave() {
    using namespace p2pkv::attaching;
    const auto area = p2pkv::SharedRegion::create(area_nbytes<RequestArea>(), &error);
    const UniqueFd line = knock(path, &error);
    const Hello hello{kHelloMagic, kVersion, static_cast<uint16_t>(Purpose::kLine), welcome.engine,
                      welcome.secret};
    Welcome answer;
    UniqueFd given;
    if (!area || !line || !greet(line.get(), hello, area->fd(), Deadline::after(60), &answer, &given, &error))
      return false;
    auto& request = *reinterpret_cast<RequestArea*>(area->base());
    request.kind = static_cast<uint32_t>(RequestKind::kLookUp);
    request.n_pages = 1;
    request.timeout_ns = 60'000'000'000;
    store_word_of(request.id, 1);
    return wake(line.get(), 0, 1);
  }
  // Has the node read this memory by the number 1.
  void share(const p2pkv::SharedRegion& memory) {
    const auto change = static_cast<uint32_t>(p2pkv::attaching::MemoryChange::kAdd);
    const p2pkv::attaching::MemoryRequest request{p2pkv::attaching::kMemoryMagic, change, 1, 0,
                                                  memory.nbytes()};
    CHECK(p2pkv::send_packet(connection.get(), request, memory.fd()));
    p2pkv::attaching::MemoryReply reply{};  // behind what the node says of its pool
    while (reply.magic != p2pkv::attaching::kReplyMagic &&
           p2pkv::wait_readable(connection.get(), Deadline::after(30))) {
      p2pkv::receive_packet(connection.get(), &reply);
    }
    CHECK_EQ(reply.status, 0U);
  }

  std::string path, error;
  UniqueFd connection;
  Welcome welcome{};
};

}  // namespace

TEST(attach_an_engine_has_no_more_of_the_pool_than_its_share) {
  constexpr uint64_t kShare = 16;  // pages
  HostsNode node(64 * 2, {kShare * kPage, 8});
  const auto quiet = node.attach();
  Bytes memory(4 * kPage);
  EnginePages pages(memory.data(), 4);
  for (const PoolStatus status : quiet->publish(pages.get(), Deadline::after(30)).statuses)
    CHECK(status == PoolStatus::kStored);
  uint64_t round = 0;
  for (int life = 0; life < 6; ++life) {
    const auto greedy = node.attach();
    for (const uint64_t end = round + 40; round < end; ++round) {
      for (size_t i = 0; i < 4; ++i) pages.keys[i] = key_of(1000 + round * 4 + i);
      for (const PoolStatus status : greedy->publish(pages.get(), Deadline::after(30)).statuses)
        CHECK(status == PoolStatus::kStored);
      CHECK(node.pool->stats().pages <= 4 + kShare);
    }
    greedy->close();
    for (const auto end = Deadline::after(30); node.host->stats().engines > 1 && !end.passed();)
      std::this_thread::yield();
  }
  for (uint64_t i = 0; i < 4; ++i) CHECK(holds_byte(*node.pool, i, static_cast<uint8_t>(i + 1)));
  CHECK_EQ(node.host->stats().largest_charge, kShare * kPage);
  CHECK_EQ(node.host->stats().n_taken_out, 6U * 160U - kShare);
}

TEST(attach_a_batch_beyond_the_share_is_answered_to_its_end) {
  HostsNode node(64, {2 * kPage, 8});
  const auto engine = node.attach(), other = node.attach();
  Bytes memory(4 * kPage);
  const EnginePages pages(memory.data(), 4);
  const PageBatch last{1, 1, &pages.keys[3], &pages.pieces[3]};
  CHECK(other->publish(last, Deadline::after(30)).statuses[0] == PoolStatus::kStored);
  const auto answer = engine->publish(pages.get(), Deadline::after(30));
  CHECK(answer.statuses[0] == PoolStatus::kStored && answer.statuses[1] == PoolStatus::kStored);
  CHECK(answer.statuses[2] == PoolStatus::kNoRoom && answer.is_found[2] == 0);
  CHECK(answer.statuses[3] == PoolStatus::kExists && answer.is_found[3] != 0);
  CHECK_EQ(word(*node.pool, answer.locations[3]), answer.locations[3].generation);
}

TEST(attach_a_request_that_no_engine_writes_counts_as_refused) {
  HostsNode node;
  const Heedless engine(node.path);
  std::string error;
  const auto line = EngineLine::open(node.path, engine.welcome, Deadline::after(30), &error);
  CHECK(line != nullptr);
  line->request().kind = 99;
  line->request().n_pages = 1;
  line->request().timeout_ns = 30'000'000'000;
  CHECK(line->ask(Deadline::after(30)) == EngineLine::Asked::kLost);
  CHECK_EQ(node.host->stats().n_refused, 1U);
}

TEST(attach_an_engine_has_as_many_requests_under_way_as_its_node_serves) {
  HostsNode node(4096, {0, 2});
  const auto engine = node.attach();
  std::atomic<size_t> n_stored{0}, n_lost{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 12; ++t) {
    threads.emplace_back([&, t] {
      Bytes memory(4 * kPage);
      for (uint64_t round = 0; round < 20; ++round) {
        EnginePages pages(memory.data(), 4);
        for (size_t i = 0; i < 4; ++i) pages.keys[i] = key_of((t * 20 + round) * 4 + i);
        const auto answer = engine->publish(pages.get(), Deadline::after(60));
        for (const uint8_t found : answer.is_found) n_stored += found;
        n_lost += answer.is_lost ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(n_stored.load(), size_t{12 * 20 * 4});  // each has waited for its turn
  CHECK_EQ(n_lost.load(), 0U);
  CHECK_EQ(node.host->stats().lines, 2U);
  CHECK_EQ(node.host->stats().n_refused, 0U);
}

TEST(attach_who_gets_no_turn_misses_at_its_deadline) {
  HostsNode node(4096, {0, 1});
  const auto engine = node.attach();
  constexpr size_t kLarge = 1024 * kGranule, kTurns = 40;
  std::atomic<size_t> n_late{0};
  std::atomic<bool> is_over{false};
  std::thread busy([&] {
    Bytes large(kLarge);
    const Piece piece = piece_of(large);
    // On a busy machine the other one may not run in as many turns.
    const Deadline enough = Deadline::after(60);
    for (size_t turn = 0; turn < kTurns || (n_late == 0 && !enough.passed()); ++turn) {
      const Key key = key_of(1'000'000 + turn);
      engine->publish({1, 1, &key, &piece}, Deadline::after(60));
    }
    is_over = true;
  });
  Bytes memory(4 * kPage);
  const EnginePages pages(memory.data(), 4);
  while (!is_over) {
    const auto answer = engine->publish(pages.get(), Deadline::after(1e-6));
    CHECK(!answer.is_lost);  // its node is there, and does what it can
    n_late += answer.statuses[0] == PoolStatus::kTimedOut ? 1 : 0;
  }
  busy.join();
  CHECK(n_late > 0);
}

TEST(attach_an_engine_that_heeds_no_limit_waits_and_is_not_refused) {
  HostsNode node(64, {0, 1});
  Heedless engine(node.path);
  std::vector<std::unique_ptr<EngineLine>> lines;
  for (size_t i = 0; i < Host::kMostLines; ++i) {
    lines.push_back(engine.open_line());
    CHECK(lines.back() != nullptr);
    if (!lines.back()) return;
  }
  std::atomic<size_t> n_answered{0};
  std::vector<std::thread> threads;
  for (const auto& line : lines) {
    threads.emplace_back([&] {
      for (uint64_t round = 0; round < 50; ++round) {
        line->request().kind = static_cast<uint32_t>(p2pkv::attaching::RequestKind::kLookUp);
        line->request().n_pages = 1;
        line->request().timeout_ns = 60'000'000'000;
        line->request().keys[0] = key_of(round);
        if (line->ask(Deadline::after(60)) != EngineLine::Asked::kAnswered) break;
        n_answered += line->answer().n_pages;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(n_answered.load(), 50 * Host::kMostLines);
  CHECK_EQ(node.host->stats().n_refused, 0U);
  CHECK(engine.open_line() == nullptr);  // one more than a node lets in
  // It is counted once the engine has been told.
  const Deadline until = Deadline::after(60);
  while (node.host->stats().n_refused == 0 && !until.passed()) std::this_thread::yield();
  CHECK_EQ(node.host->stats().n_refused, 1U);
}

TEST(attach_a_line_that_is_closed_is_in_nobodys_way) {
  HostsNode node(64, {0, 1});
  Heedless engine(node.path);
  std::vector<std::unique_ptr<EngineLine>> lines(Host::kMostLines);
  for (size_t i = 0; i < 40 * Host::kMostLines; ++i) {
    lines[i % Host::kMostLines].reset();
    lines[i % Host::kMostLines] = engine.open_line();
    CHECK(lines[i % Host::kMostLines] != nullptr);
  }
  CHECK_EQ(node.host->stats().n_refused, 0U);
}

namespace {

// Opens lines and closes them beside a long request, whose turn they wait for: how many there were when that
// ended. More of them are opened than there may be at once, so that the last ones have to wait for the first.
size_t close_lines_beside_a_long_request() {
  constexpr size_t kPages = 32, kLarge = 1024 * kGranule;
  HostsNode node(kPages * kLarge / kGranule, {0, 1});
  Heedless engine(node.path);
  const auto memory = p2pkv::SharedRegion::create(kLarge, &engine.error);
  CHECK(memory != nullptr);
  engine.share(*memory);
  const auto busy = engine.open_line();
  std::atomic<size_t> n_closed{0};
  size_t n_at_its_end = 0;
  std::thread publisher([&] {
    auto& request = busy->request();
    request.kind = static_cast<uint32_t>(p2pkv::attaching::RequestKind::kPublish);
    request.n_pages = kPages;
    request.n_pieces = 1;
    request.timeout_ns = 60'000'000'000;
    for (size_t i = 0; i < kPages; ++i) {
      request.keys[i] = key_of(i);
      request.pieces[i] = {1, 0, 0, kLarge};
    }
    CHECK(busy->ask(Deadline::after(60)) == EngineLine::Asked::kAnswered);
    n_at_its_end = n_closed;
  });
  for (const auto end = Deadline::after(60); node.host->stats().n_requests == 0 && !end.passed();)
    std::this_thread::yield();
  for (size_t i = 0; i < 3 * Host::kMostLines; ++i, ++n_closed) CHECK(engine.ask_and_leave());
  publisher.join();
  CHECK_EQ(node.host->stats().n_refused, 0U);
  return n_at_its_end;
}

}  // namespace

// Closed lines that wait for a turn, which a long request has, end when that does.
TEST(attach_a_line_waits_for_closed_ones_to_end) {
  constexpr size_t kAll = 2 * Host::kMostLines - 1;  // beside the one of the request
  bool have_waited = false;
  // Where the request was over before there were as many, none had to wait.
  for (const auto until = Deadline::after(60); !have_waited && !until.passed();)
    have_waited = close_lines_beside_a_long_request() >= kAll;
  CHECK(have_waited);
}

TEST(attach_no_more_have_a_turn_than_there_are) {
  constexpr size_t kTurns = 2;
  Turns turns(kTurns);
  std::atomic<size_t> n_served{0}, n_most{0}, n_done{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        CHECK(turns.take(Deadline::after(60), [] { return false; }));
        const size_t n = ++n_served;
        for (size_t most = n_most; n > most && !n_most.compare_exchange_weak(most, n);) continue;
        std::this_thread::yield();
        --n_served;
        ++n_done;
        turns.give_back();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(n_done.load(), 8U * 200U);
  CHECK(n_most <= kTurns);
  for (size_t i = 0; i < kTurns; ++i) CHECK(turns.take(Deadline::after(0), [] { return false; }));
  CHECK(!turns.take(Deadline::after(0), [] { return false; }));
  CHECK(!turns.take(Deadline::after(60), [] { return true; }));
  turns.give_back();
  CHECK(turns.take(Deadline::after(0), [] { return false; }));
}

TEST(attach_engines_that_are_away_at_once_go_on_with_their_own_shares) {
  HostsNode node(64 * 2, {16 * kPage, 8});
  auto quiet = node.attach(1), greedy = node.attach(2);
  Bytes memory(4 * kPage);
  EnginePages pages(memory.data(), 4);
  quiet->publish(pages.get(), Deadline::after(30));
  const auto leave = [&](const std::shared_ptr<Attachment>& engine, uint64_t n_others) {
    engine->close();
    for (const auto end = Deadline::after(30); node.host->stats().engines > n_others && !end.passed();)
      std::this_thread::yield();
  };
  leave(greedy, 1);
  leave(quiet, 0);
  greedy = node.attach(2);
  for (uint64_t round = 0; round < 20; ++round) {
    for (size_t i = 0; i < 4; ++i) pages.keys[i] = key_of(1000 + round * 4 + i);
    greedy->publish(pages.get(), Deadline::after(30));
  }
  for (uint64_t i = 0; i < 4; ++i) CHECK(holds_byte(*node.pool, i, static_cast<uint8_t>(i + 1)));
}
