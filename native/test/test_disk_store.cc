// The disk store under sanitizers: threads that write, read, evict and break it at once. The Python tests go
// deeper; these see races and lifetimes.
#include <atomic>
#include <cerrno>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "disk/extents.h"
#include "disk/faulty_files.h"
#include "disk/store.h"
#include "disk_calls.h"
#include "seed.h"

namespace {

using p2pkv::Deadline;
using p2pkv::disk::DiskOptions;
using p2pkv::disk::Extents;
using p2pkv::disk::FaultyFiles;
using p2pkv::disk::FileCall;
using p2pkv::disk::LayoutKind;
using namespace p2pkv::test;

TEST(disk_pages_come_back_before_and_after_a_restart) {
  for (const LayoutKind layout : kLayouts) {
    for (const bool allow_uring : {true, false}) {
      const TemporaryFolder folder;
      DiskOptions options = small_options(layout);
      options.allow_uring = allow_uring;
      std::atomic<uint64_t> n_released{0};
      uint64_t n_accepted = 0;
      {
        const auto store = open(folder.path(), options);
        Batch batch(7);
        batch.write(*store, &n_released, &n_accepted);
        CHECK(store->flush(Deadline::after(20)));
        CHECK_EQ(batch.read(*store, 10), kBatch);
        CHECK(store->close(Deadline::after(10)));
      }
      CHECK_EQ(n_released.load(), n_accepted);
      const auto store = open(folder.path(), options);
      CHECK_EQ(store->drain_recovered(1, Deadline::after(10)).size(), 1u);
      while (!store->is_recovered()) std::this_thread::yield();
      CHECK_EQ(Batch(7).read(*store, 10), kBatch);
    }
  }
}

TEST(disk_pages_that_lie_together_are_read_together_and_fail_alone) {
  for (const LayoutKind layout : {LayoutKind::kBucket, LayoutKind::kOffset}) {
    const TemporaryFolder folder;
    FaultyFiles faults;
    DiskOptions options = small_options(layout);
    options.files = &faults;
    std::atomic<uint64_t> n_released{0};
    uint64_t n_accepted = 0;
    const auto store = open(folder.path(), options);
    while (!store->is_recovered()) std::this_thread::yield();
    Batch batch(7);
    batch.write(*store, &n_released, &n_accepted);
    CHECK(store->flush(Deadline::after(20)));
    const uint64_t n_calls = faults.n_calls();
    CHECK_EQ(batch.read(*store, 10), kBatch);
    CHECK_EQ(faults.n_calls(), n_calls + 1);
    faults.fail(FileCall::kRead, EIO, 1);
    CHECK_EQ(batch.read(*store, 10), kBatch);
    faults.fail(FileCall::kRead, EIO, 2);  // all together, and one of them alone
    CHECK_EQ(batch.read(*store, 10), kBatch - 1);
    CHECK_EQ(batch.read(*store, 10), kBatch - 1);
    CHECK_EQ(store->n_pages(), kBatch - 1);
  }
}

TEST(disk_races_lose_no_ticket_and_serve_no_wrong_byte) {
  const uint64_t seed = p2pkv::test::seed("disk_races_lose_no_ticket_and_serve_no_wrong_byte");
  for (const LayoutKind layout : kLayouts) {
    const TemporaryFolder folder;
    std::atomic<uint64_t> n_released{0};
    std::atomic<uint64_t> n_hits{0};
    uint64_t n_accepted = 0;
    {
      const auto store = open(folder.path(), small_options(layout));
      std::atomic<bool> is_over{false};
      std::vector<std::thread> threads;
      for (uint64_t number = 0; number < 2; ++number) {
        threads.emplace_back([&, number] {
          std::mt19937_64 random(seed + number);
          while (!is_over) n_hits += Batch(random() % 3000).read(*store, 5);
        });
      }
      threads.emplace_back([&] {
        while (!is_over) store->drain_dropped(100, Deadline::after(0.01));
      });
      for (uint64_t first = 0; first < 4000; first += kBatch) {
        Batch batch(first);
        batch.write(*store, &n_released, &n_accepted);
        CHECK(store->flush(Deadline::after(20)));
      }
      CHECK(store->close(Deadline::after(20)));
      is_over = true;
      for (std::thread& thread : threads) thread.join();
      CHECK_EQ(store->counters().bad_records.load(), 0u);
    }
    CHECK_EQ(n_released.load(), n_accepted);
    CHECK(n_hits > 0);
  }
}

TEST(disk_faults_come_and_go_and_every_ticket_is_released) {
  const uint64_t seed = p2pkv::test::seed("disk_faults_come_and_go_and_every_ticket_is_released");
  for (const LayoutKind layout : kLayouts) {
    const TemporaryFolder folder;
    FaultyFiles faults;
    DiskOptions options = small_options(layout);
    options.files = &faults;
    std::mt19937_64 random(seed);
    std::atomic<uint64_t> n_released{0};
    uint64_t n_accepted = 0;
    std::vector<std::unique_ptr<Batch>> batches;
    {
      const auto store = open(folder.path(), options);
      for (uint64_t first = 0; first < 1600; first += kBatch) {
        if (random() % 3 == 0) faults.fail(static_cast<FileCall>(random() % p2pkv::disk::kFileCalls), EIO, 2);
        batches.push_back(std::make_unique<Batch>(first));
        batches.back()->write(*store, &n_released, &n_accepted);
        Batch(first / 2).read(*store, 5);
      }
      faults.heal();
      CHECK(store->close(Deadline::after(20)));
    }
    CHECK_EQ(n_released.load(), n_accepted);
    const auto store = open(folder.path(), options);
    while (!store->is_recovered()) std::this_thread::yield();
    for (uint64_t first = 0; first < 1600; first += kBatch) Batch(first).read(*store, 5);
  }
}

TEST(disk_a_read_that_hangs_is_left_behind_with_its_buffers) {
  const TemporaryFolder folder;
  FaultyFiles faults;
  DiskOptions options = small_options(LayoutKind::kBucket);
  options.files = &faults;
  std::atomic<uint64_t> n_released{0};
  uint64_t n_accepted = 0;
  const auto store = open(folder.path(), options);
  Batch written(0);
  written.write(*store, &n_released, &n_accepted);
  CHECK(store->flush(Deadline::after(20)));
  faults.hang(FileCall::kRead);
  {
    Batch batch(0);
    CHECK_EQ(batch.read(*store, 0.05), 0u);
  }
  faults.heal();
  CHECK(store->close(Deadline::after(20)));
}

TEST(disk_extents_are_never_given_twice) {
  std::mt19937_64 random(p2pkv::test::seed("disk_extents_are_never_given_twice"));
  constexpr uint64_t kTotal = 1000;
  Extents extents(kTotal);
  std::vector<uint8_t> is_taken(kTotal, 0);
  std::vector<std::pair<uint64_t, uint64_t>> held;
  for (int i = 0; i < 20000; ++i) {
    if (random() % 2 == 0) {
      const uint64_t nbytes = 1 + random() % 40;
      const uint64_t offset = extents.allocate(nbytes);
      if (offset == Extents::kNone) {
        CHECK(extents.largest() < nbytes);
        continue;
      }
      for (uint64_t k = offset; k < offset + nbytes; ++k) CHECK(is_taken[k]++ == 0);
      held.emplace_back(offset, nbytes);
    } else if (!held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      const auto [offset, nbytes] = held.back();
      held.pop_back();
      for (uint64_t k = offset; k < offset + nbytes; ++k) --is_taken[k];
      extents.free(offset, nbytes);
      CHECK(extents.take(offset, nbytes));
      extents.free(offset, nbytes);
    }
  }
  for (const auto& [offset, nbytes] : held) {
    CHECK(!extents.take(offset, nbytes));
    extents.free(offset, nbytes);
  }
  CHECK_EQ(extents.n_free(), kTotal);
  CHECK_EQ(extents.largest(), kTotal);
}

}  // namespace
