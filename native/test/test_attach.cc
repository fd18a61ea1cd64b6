// Both ends of an attachment, in one process: what is stored, and what becomes of what is withdrawn.
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "attach/waiting.h"
#include "hosts_node.h"
#include "net/packets.h"
#include "seed.h"

namespace {

using p2pkv::SharedRegion;
using p2pkv::attaching::kSomewhere;
using p2pkv::attaching::load_word_of;
using p2pkv::attaching::store_word_of;
using p2pkv::attaching::Waiting;

// Two ends of a connection of whole packets.
struct Pair {
  Pair() {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    first = UniqueFd(ends[0]);
    second = UniqueFd(ends[1]);
  }
  UniqueFd first, second;
};

// An end that is called once while it waits, and counts how often it looks for what it waits for.
struct CalledOnce {
  // The other end says by `is_other_awake` whether, and on which core, it is awake. What this one waits for
  // is there at its second sleep, or at its look `seen_at` after the call.
  explicit CalledOnce(uint64_t is_other_awake, size_t seen_at = SIZE_MAX)
      : is_other_awake_(is_other_awake), seen_at_(seen_at) {}

  void wait() {
    n_sleeps = n_looks_before_call = n_looks_after_call = 0;
    CHECK(p2pkv::attaching::wake(pair_.second.get(), 0, 1));
    const auto is_there = [&] {
      if (load_word_of(is_awake_) == 0) return ++n_sleeps == 2;
      return n_sleeps == 0 ? ++n_looks_before_call == SIZE_MAX : ++n_looks_after_call == seen_at_;
    };
    CHECK(waiting_.until(is_there, Deadline::after(20)) == Waiting::Woken::kSeen);
  }

  size_t n_sleeps = 0, n_looks_before_call = 0, n_looks_after_call = 0;

 private:
  const Pair pair_;
  uint64_t is_awake_ = 0;
  const uint64_t is_other_awake_;
  const size_t seen_at_;
  Waiting waiting_{pair_.first.get(), &is_awake_, &is_other_awake_};
};

}  // namespace

TEST(attach_pages_in_shared_memory_are_pulled_into_the_pool) {
  HostsNode node;
  const auto engine = node.attach();
  std::string error;
  const auto memory = SharedRegion::create(4 * kPage, &error);
  CHECK(share(*engine, reinterpret_cast<uint64_t>(memory->base()), 4 * kPage, memory->fd()).empty());
  const EnginePages pages(memory->base(), 4);
  const auto answer = engine->publish(pages.get(), Deadline::after(10));
  CHECK(!answer.is_lost);
  for (size_t i = 0; i < 4; ++i) {
    CHECK(answer.statuses[i] == PoolStatus::kStored);
    CHECK(answer.is_found[i] != 0);
    CHECK_EQ(answer.locations[i].owner, 7U);
    CHECK_EQ(word(*node.pool, answer.locations[i]), answer.locations[i].generation);
    CHECK(holds_byte(*node.pool, i, static_cast<uint8_t>(i + 1)));
  }
  CHECK(engine->publish(pages.get(), Deadline::after(10)).statuses[0] == PoolStatus::kExists);
  CHECK_EQ(node.host->stats().n_stored_pages, 4U);
}

TEST(attach_pages_in_other_memory_go_through_staging) {
  HostsNode node;
  const auto engine = node.attach();
  Bytes memory(4 * kPage);
  const EnginePages pages(memory.data(), 4);
  const auto answer = engine->publish(pages.get(), Deadline::after(10));
  for (size_t i = 0; i < 4; ++i) CHECK(answer.statuses[i] == PoolStatus::kStored);
  for (size_t i = 0; i < 4; ++i) CHECK(holds_byte(*node.pool, i, static_cast<uint8_t>(i + 1)));
}

TEST(attach_a_batch_of_many_requests_is_refused_whole_for_another_length) {
  HostsNode node;
  const auto engine = node.attach();
  Bytes memory(4 * kPage);
  EnginePages pages(memory.data(), 4);
  CHECK(publish(*node.pool, 3, kGranule).status == PoolStatus::kStored);
  const auto answer = engine->publish(pages.get(), Deadline::after(10));
  CHECK(answer.statuses[3] == PoolStatus::kOtherLength);
  CHECK_EQ(answer.locations[3].length, uint64_t{kGranule});
  for (uint64_t i = 0; i < 3; ++i) CHECK(!contains(*node.pool, i));
}

TEST(attach_memory_that_can_shrink_is_refused_with_a_reason) {
  HostsNode node;
  const auto engine = node.attach();
  const UniqueFd fd(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(ftruncate(fd.get(), kPage) == 0);
  const std::string why = share(*engine, 4096, kPage, fd.get());
  CHECK(why.find("F_SEAL_SHRINK") != std::string::npos);
  CHECK(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  CHECK(!share(*engine, 4096, 2 * kPage, fd.get()).empty());  // longer than it is
  CHECK(share(*engine, 4096, kPage, fd.get()).empty());
}

// The memory is overwritten as soon as the call has returned, whatever it said: at first the end of each
// page, which is copied last.
TEST(attach_what_is_withdrawn_is_never_served_with_other_bytes) {
  HostsNode node(4096);
  const auto engine = node.attach();
  std::string error;
  constexpr size_t kPages = 16, kLarge = 128 * 1024;
  const auto memory = SharedRegion::create(kPages * kLarge, &error);
  const auto base = reinterpret_cast<uint64_t>(memory->base());
  CHECK(share(*engine, base, kPages * kLarge, memory->fd()).empty());
  std::mt19937_64 chance(p2pkv::test::seed("attach_what_is_withdrawn"));
  size_t n_late = 0, n_stored = 0, n_wrong = 0;
  for (uint64_t round = 0; round < 600 || n_late == 0 || n_stored == 0; ++round) {
    std::vector<Key> keys;
    std::vector<Piece> pieces;
    const auto byte = static_cast<uint8_t>(round % 200 + 1);
    for (size_t i = 0; i < kPages; ++i) {
      keys.push_back(key_of(round * kPages + i));
      pieces.push_back({static_cast<int64_t>(base + i * kLarge), kLarge});
    }
    std::memset(memory->base(), byte, kPages * kLarge);
    const double timeout = static_cast<double>(chance() % 2000) * 1e-6;
    const auto answer = engine->publish({kPages, 1, keys.data(), pieces.data()}, Deadline::after(timeout));
    for (size_t i = 0; i < kPages; ++i) memory->base()[(i + 1) * kLarge - 1] = 0xff;
    std::memset(memory->base(), 0xff, kPages * kLarge);
    for (size_t i = 0; i < kPages; ++i) (answer.is_found[i] != 0 ? n_stored : n_late) += 1;
    engine->look_up(keys.data(), 1, Deadline::after(10));  // behind the request, whatever has become of it
    for (size_t i = 0; i < kPages; ++i) {
      const Bytes bytes = fetch(*node.pool, round * kPages + i, kLarge);
      if (!bytes.empty() && (bytes.front() != byte || bytes.back() != byte)) ++n_wrong;
    }
  }
  CHECK_EQ(n_wrong, 0U);
}

// Whoever has done something while he saw the other one awake sends nothing.
TEST(attach_nobody_sleeps_over_what_was_done_while_he_was_awake) {
  const Pair pair;
  uint64_t is_awake = 0;
  Waiting waiting(pair.first.get(), &is_awake, &kSomewhere);
  const auto is_done = [&] { return load_word_of(is_awake) == 0; };  // as late as can be
  CHECK(waiting.until(is_done, Deadline::after(20)) == Waiting::Woken::kSeen);
}

// On the caller's core it would take the time that the caller needs to end what it was called for.
TEST(attach_who_wakes_on_its_callers_core_gives_that_back) {
  std::thread pinned([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<size_t>(sched_getcpu()), &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    CalledOnce beside(p2pkv::attaching::awake_here());
    beside.wait();
    CHECK_EQ(beside.n_looks_after_call, 2U);  // when it has woken, and before it sleeps again
    CalledOnce elsewhere(p2pkv::attaching::awake_here() + 1);
    elsewhere.wait();
    CHECK(elsewhere.n_looks_after_call > 2);
  });
  pinned.join();
}

TEST(attach_what_comes_soon_after_a_call_says_nothing_of_the_time_before) {
  CalledOnce end(kSomewhere, 3);  // which it sees while it waits awake
  constexpr size_t kWaits = 400;
  size_t n_awake_before = 0, n_seen_after = 0;
  for (size_t i = 0; i < kWaits; ++i) {
    end.wait();
    if (end.n_looks_before_call > 1) ++n_awake_before;
    if (end.n_sleeps == 1) ++n_seen_after;
  }
  CHECK(n_awake_before <= 4 + kWaits / 16);
  CHECK_EQ(n_seen_after, kWaits);
}

TEST(attach_ends_of_a_line_wake_each_other) {
  const Pair pair;
  constexpr uint64_t kRounds = 4000;
  uint64_t asked = 0, answered = 0, asking_awake = 0, answering_awake = 0;
  std::thread answering([&] {
    Waiting waiting(pair.second.get(), &answering_awake, &asking_awake);
    for (uint64_t id = 1; id <= kRounds; ++id) {
      const auto is_asked = [&] { return load_word_of(asked) == id; };
      CHECK(waiting.until(is_asked, Deadline::after(60)) == Waiting::Woken::kSeen);
      store_word_of(answered, id);
      CHECK(p2pkv::attaching::wake(pair.second.get(), asking_awake, id));
    }
  });
  std::mt19937_64 chance(p2pkv::test::seed("attach_ends_of_a_line"));
  Waiting waiting(pair.first.get(), &asking_awake, &answering_awake);
  for (uint64_t id = 1; id <= kRounds; ++id) {
    if (chance() % 8 == 0) CHECK(p2pkv::attaching::wake(pair.first.get(), answering_awake, id));  // ahead
    const auto until = Deadline::after(static_cast<double>(chance() % 150) * 1e-6);
    while (!until.passed()) {
    }
    store_word_of(asked, id);
    CHECK(p2pkv::attaching::wake(pair.first.get(), answering_awake, id));
    const auto is_answered = [&] { return load_word_of(answered) == id; };
    CHECK(waiting.until(is_answered, Deadline::after(60)) == Waiting::Woken::kSeen);
  }
  answering.join();
}

TEST(attach_an_engine_that_talks_nonsense_is_hung_up_on) {
  HostsNode node;
  std::string error;
  const UniqueFd stranger = p2pkv::attaching::knock(node.path, &error);
  CHECK(p2pkv::send_bytes(stranger.get(), "nonsense", 8));
  char byte;
  CHECK(p2pkv::wait_readable(stranger.get(), Deadline::after(10)));
  CHECK(p2pkv::receive_bytes(stranger.get(), &byte, 1) == p2pkv::Received::kEnd);
  const UniqueFd newer = p2pkv::attaching::knock(node.path, &error);
  p2pkv::attaching::Welcome welcome;
  UniqueFd given;
  const p2pkv::attaching::Hello hello{p2pkv::attaching::kHelloMagic, 99, 1, 0, 0};
  CHECK(!p2pkv::attaching::greet(newer.get(), hello, -1, Deadline::after(10), &welcome, &given, &error));
  CHECK(error.find("version " + std::to_string(p2pkv::attaching::kVersion) + " of attaching") !=
        std::string::npos);
  CHECK(node.attach() != nullptr);
  CHECK_EQ(node.host->stats().n_refused, 2U);
}

namespace {

size_t n_descriptors() {
  size_t n = 0;
  for ([[maybe_unused]] const auto& one : std::filesystem::directory_iterator("/proc/self/fd")) ++n;
  return n;
}

// Sends `n` descriptors along with nonsense, as no program of p2pkv does.
void send_with(int connection, size_t n, int fd) {
  char text[] = "nonsense";
  iovec part{text, sizeof text};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(n * sizeof(int));
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(n * sizeof(int));
  for (size_t i = 0; i < n; ++i) std::memcpy(CMSG_DATA(rights) + i * sizeof fd, &fd, sizeof fd);
  CHECK_EQ(sendmsg(connection, &message, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof text));
}

}  // namespace

TEST(attach_descriptors_that_nobody_expects_are_closed) {
  Pair ends;
  const UniqueFd memory(memfd_create("p2pkv-test", MFD_CLOEXEC));
  const size_t before = n_descriptors();
  for (const size_t n : {1, 2, 3, 4}) {
    for (const bool is_taken : {false, true}) {
      send_with(ends.first.get(), n, memory.get());
      char text[9];
      UniqueFd given;
      CHECK(p2pkv::receive_bytes(ends.second.get(), text, sizeof text, is_taken ? &given : nullptr) ==
            p2pkv::Received::kPacket);
      CHECK_EQ(static_cast<bool>(given), is_taken && n == 1);
      CHECK_EQ(n_descriptors(), before + (given ? 1 : 0));
    }
  }
}

TEST(attach_a_node_without_descriptors_pauses_and_lets_in_who_waited) {
  HostsNode node;
  std::string error;
  const UniqueFd visitor = p2pkv::attaching::knock(node.path, &error);
  CHECK(node.attach() != nullptr);  // so that the visitor is in, since he came before
  rlimit limit{};
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  const UniqueFd late(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  node.path.copy(address.sun_path, node.path.size());
  // The lowest that is free is beyond the limit; 0 would be none for poll(2) as well, which takes no more
  // then.
  const int next_free = UniqueFd(dup(late.get())).get();
  const rlimit none{static_cast<rlim_t>(next_free), limit.rlim_max};
  CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
  CHECK(connect(late.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  timespec began{}, ended{};
  CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &began) == 0);
  pollfd silent{late.get(), POLLIN, 0};
  CHECK_EQ(poll(&silent, 1, 1000), 0);  // nobody says anything to who waits
  CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ended) == 0);
  CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  // A thread that does not pause uses all of a core that it gets.
  CHECK((ended.tv_sec - began.tv_sec) * 1'000'000'000 + ended.tv_nsec - began.tv_nsec < 50'000'000);
  CHECK(p2pkv::send_bytes(late.get(), "nonsense", 8));
  CHECK(p2pkv::wait_readable(late.get(), Deadline::after(10)));
  char byte;
  CHECK(p2pkv::receive_bytes(late.get(), &byte, 1) == p2pkv::Received::kEnd);
}

TEST(attach_an_engine_is_told_its_nodes_cluster) {
  HostsNode node;
  CHECK(node.attach()->cluster() == "blue");
}

TEST(attach_calls_end_when_the_node_does) {
  auto node = std::make_unique<HostsNode>();
  const auto engine = node->attach();
  Bytes memory(4 * kPage);
  const EnginePages pages(memory.data(), 4);
  CHECK(!engine->publish(pages.get(), Deadline::after(10)).is_lost);
  std::thread ending([&] { node.reset(); });
  while (!engine->publish(pages.get(), Deadline::after(10)).is_lost) {
  }
  ending.join();
  CHECK(engine->wait_gone(Deadline::after(10)));
}

TEST(attach_the_nodes_epochs_are_seen_without_asking) {
  HostsNode node;
  const auto engine = node.attach();
  const uint64_t before = engine->epochs_version();
  const p2pkv::NamespaceEpoch raised{key_of(1), 5};
  CHECK(node.epochs->raise(&raised, 1));
  CHECK(engine->epochs_version() != before);
}

TEST(attach_threads_of_an_engine_publish_at_once) {
  HostsNode node(4096);
  const auto engine = node.attach();
  std::atomic<size_t> n_stored{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 12; ++t) {
    threads.emplace_back([&, t] {
      Bytes memory(4 * kPage);
      for (uint64_t round = 0; round < 20; ++round) {
        EnginePages pages(memory.data(), 4);
        for (size_t i = 0; i < 4; ++i) pages.keys[i] = key_of((t * 20 + round) * 4 + i);
        for (const uint8_t found : engine->publish(pages.get(), Deadline::after(30)).is_found)
          n_stored += found;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(n_stored.load(), size_t{12 * 20 * 4});
}
