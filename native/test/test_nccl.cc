// The nccl transport against itself, over an emulated NCCL on an emulated driver: what the sanitizers should
// see, and what goes wrong in the middle.
#include <algorithm>

#include "nccl_pair.h"

using namespace p2pkv;
using p2pkv::test::eventually;
using p2pkv::test::NcclPair;

namespace {

bool has(const Transfer& transfer, Status status) {
  const auto& all = transfer.statuses();
  return std::find(all.begin(), all.end(), status) != all.end();
}

const std::vector<uint64_t> kWords(NcclPair::kPages, 2);

}  // namespace

TEST(nccl_reads_pages_and_gives_everything_back) {
  const auto before = test::FakeCuda::get().counts();
  {
    NcclPair pair;
    for (int round = 0; round < 5; ++round) CHECK(pair.reads_all());
    // One communicator, of a rank on either side, for all endpoints.
    CHECK_EQ(pair.nccl.counts().communicators, 2);
    pair.reader->close();
    pair.owner->close();
    CHECK_EQ(pair.nccl.counts().communicators, 0);
  }
  CHECK(eventually([&] {
    const auto after = test::FakeCuda::get().counts();
    return after.locked_bytes == before.locked_bytes && after.streams == before.streams &&
           after.events == before.events && after.contexts == before.contexts;
  }));
}

TEST(nccl_torn_pages_are_never_ok) {
  NcclPair pair;
  const auto endpoint = pair.connect();
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t word = 4; !stop; word += 2) {
      for (uint64_t page = 0; page < NcclPair::kPages && !stop; ++page) {
        pair.rewrite(page, word);
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
  });
  int n_ok = 0, n_rejected = 0, n_wrong = 0;
  for (int round = 0; round < 400 && (round < 50 || n_ok == 0 || n_rejected == 0); ++round) {
    std::vector<uint64_t> words;
    for (uint64_t page = 0; page < NcclPair::kPages; ++page)
      words.push_back(load_word(pair.memory->base() + page * 8) & ~uint64_t{1});
    const auto transfer = pair.read(*endpoint, words);
    transfer->wait(60);
    for (uint64_t page = 0; page < NcclPair::kPages; ++page) {
      const bool is_ok = transfer->statuses()[page] == Status::kOk;
      ++(is_ok ? n_ok : n_rejected);
      if (is_ok && !pair.holds(page, words[page])) ++n_wrong;
    }
  }
  stop = true;
  writer.join();
  CHECK_EQ(n_wrong, 0);
  CHECK(n_ok > 0 && n_rejected > 0);
}

TEST(nccl_a_read_that_is_held_up_ends_in_time_and_its_communicator_soon) {
  NcclPair pair;
  CHECK(pair.reads_all());
  const auto endpoint = pair.connect();
  pair.nccl.hold(1);
  pair.nccl.delay_aborts(300'000);  // nobody waits for NCCL to let go
  const auto transfer = pair.read(*endpoint, kWords);
  const auto began = std::chrono::steady_clock::now();
  transfer->wait(0.1);
  CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(5));
  CHECK(has(*transfer, Status::kTimedOut));
  std::fill(pair.bytes.begin(), pair.bytes.end(), uint8_t{0x11});
  // Sooner than the owner, who gives a reader that takes nothing 30 seconds.
  CHECK(eventually([&] { return pair.nccl.counts().communicators == 0; }, 15));
  pair.nccl.reset();
  CHECK(std::all_of(pair.bytes.begin(), pair.bytes.end(), [](uint8_t byte) { return byte == 0x11; }));
  CHECK(pair.reads_all());
}

TEST(nccl_a_read_that_gave_up_does_not_end_what_still_moves) {
  NcclPair pair;
  CHECK(pair.reads_all());
  const auto endpoint = pair.connect();
  const auto transfer = pair.read(*endpoint, kWords);
  transfer->wait(0);
  CHECK(pair.read(*endpoint, kWords)->statuses()[0] == Status::kPeerLost);
  CHECK(pair.reads_all());
  CHECK_EQ(pair.nccl.counts().communicators, 2);
}

TEST(nccl_closing_a_region_does_not_wait_for_who_takes_nothing) {
  NcclPair pair;
  const auto endpoint = pair.connect();
  pair.nccl.hold(1);
  const auto transfer = pair.read(*endpoint, kWords);
  CHECK(eventually([&] { return pair.nccl.counts().sends > 0 && !transfer->advance(0); }));
  pair.region->close();
  transfer->wait(60);
  CHECK(!has(*transfer, Status::kOk));
}

TEST(nccl_failures_lose_the_peer_and_the_next_connection_is_good) {
  NcclPair pair;
  for (const bool is_meeting : {true, false}) {
    if (is_meeting) {
      pair.nccl.fail_meeting(1, 6);
    } else {
      CHECK(pair.reads_all());
      pair.nccl.fail_operation(2, 6);
    }
    const auto endpoint = pair.connect();
    const auto transfer = pair.read(*endpoint, kWords);
    transfer->wait(60);
    CHECK(has(*transfer, Status::kPeerLost));
    for (uint64_t page = 0; page < NcclPair::kPages; ++page)
      CHECK(transfer->statuses()[page] != Status::kOk || pair.holds(page, 2));
    CHECK(eventually([&] { return pair.nccl.counts().communicators == 0; }));
    CHECK(pair.reads_all());
  }
}

TEST(nccl_ranks_that_never_meet_cost_the_deadline_alone) {
  NcclPair pair;
  pair.nccl.never_meet(1);
  const auto endpoint = pair.connect();
  const auto transfer = pair.read(*endpoint, kWords);
  transfer->wait(0.05);
  CHECK(has(*transfer, Status::kTimedOut));
  // The meeting goes on: who comes later finds it made.
  pair.nccl.reset();
  CHECK(pair.reads_all());
  pair.nccl.never_meet(1);
  pair.reader->close();
  pair.owner->close();
  CHECK_EQ(pair.nccl.counts().communicators, 0);
}

TEST(nccl_there_are_no_more_communicators_than_allowed) {
  NcclOptions options;
  options.communicators = 1;
  NcclPair pair(options);
  CHECK(pair.reads_all());
  std::string error;
  const auto other = make_nccl_transport(options, &error);
  const auto endpoint = pair.reader->open();
  CHECK(!endpoint->bind(other->accept(endpoint->describe(), &error), &error));
  CHECK(error.find("communicators") != std::string::npos);
  // An owner that has none left turns the reader away.
  const auto late = other->open();
  CHECK(late->bind(pair.owner->accept(late->describe(), &error), &error));
  const auto remote = late->attach(pair.region->describe(), &error);
  const auto local = other->register_memory(pair.bytes.data(), NcclPair::kBytes, -1, false, &error);
  const auto transfer = late->read(local, remote, {{0, 0, 8}}, {});
  transfer->wait(60);
  CHECK(transfer->statuses()[0] == Status::kPeerLost);
}

TEST(nccl_memory_that_the_device_can_not_have_is_refused) {
  NcclPair pair;
  std::vector<uint8_t> memory(4096);
  std::string error;
  test::FakeCuda::get().fail("cuMemHostRegister", 1, 2, 0);
  CHECK(!pair.owner->register_memory(memory.data(), memory.size(), -1, true, &error));
  CHECK(error.find("cuMemHostRegister") != std::string::npos);
  CHECK(pair.owner->register_memory(memory.data(), memory.size(), -1, true, &error));
}
