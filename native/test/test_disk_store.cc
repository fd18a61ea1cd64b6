// The disk store under sanitizers: threads that write, read, evict and break it at once. The Python tests go
// deeper; these see races and lifetimes.
#include <stdlib.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "base/checksum.h"
#include "check.h"
#include "disk/faulty_files.h"
#include "disk/store.h"
#include "keys.h"
#include "seed.h"

namespace {

using p2pkv::Deadline;
using p2pkv::Key;
using p2pkv::Piece;
using p2pkv::disk::Arena;
using p2pkv::disk::DiskOptions;
using p2pkv::disk::DiskStore;
using p2pkv::disk::Extents;
using p2pkv::disk::FaultyFiles;
using p2pkv::disk::FileCall;
using p2pkv::disk::LayoutKind;
using p2pkv::disk::ReadStatus;
using p2pkv::test::key_of;

constexpr size_t kBatch = 16;
constexpr LayoutKind kLayouts[] = {LayoutKind::kBucket, LayoutKind::kFile, LayoutKind::kOffset};

class TemporaryFolder {
 public:
  TemporaryFolder() {
    char pattern[] = "/tmp/p2pkv-disk-XXXXXX";
    path_ = mkdtemp(pattern);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Every 8 bytes of a page are its name; the size depends on the name alone.
size_t nbytes_of(uint64_t name) {
  return (1 + name % 5) * 1000;
}

struct Batch {
  std::vector<Key> keys = std::vector<Key>(kBatch);
  std::vector<Piece> pages = std::vector<Piece>(kBatch);
  std::vector<uint64_t> names = std::vector<uint64_t>(kBatch);
  std::vector<uint64_t> checksums = std::vector<uint64_t>(kBatch);
  std::vector<uint64_t> tickets = std::vector<uint64_t>(kBatch);
  std::vector<std::vector<uint64_t>> memory{kBatch, std::vector<uint64_t>(5000 / 8)};

  explicit Batch(uint64_t first) {
    for (size_t i = 0; i < kBatch; ++i) {
      names[i] = first + i;
      keys[i] = key_of(names[i]);
      std::fill(memory[i].begin(), memory[i].end(), names[i]);
      pages[i] = {reinterpret_cast<int64_t>(memory[i].data()), static_cast<int64_t>(nbytes_of(names[i]))};
      checksums[i] = p2pkv::checksum(memory[i].data(), nbytes_of(names[i]));
    }
  }
  // Each ticket is the address of a counter.
  void write(DiskStore& store, std::atomic<uint64_t>* n_released, uint64_t* n_accepted) {
    std::fill(tickets.begin(), tickets.end(), reinterpret_cast<uint64_t>(n_released));
    uint8_t accepted[kBatch];
    std::vector<uint64_t> lengths;
    for (const Piece& page : pages) lengths.push_back(static_cast<uint64_t>(page.nbytes));
    store.write(
        {kBatch, keys.data(), pages.data(), lengths.data(), checksums.data(), tickets.data(), store.now()},
        accepted);
    for (const uint8_t one : accepted) *n_accepted += one;
  }
  // The number of hits; checks their bytes.
  size_t read(DiskStore& store, double timeout) {
    for (auto& page : memory) std::fill(page.begin(), page.end(), ~uint64_t{0});
    ReadStatus statuses[kBatch];
    store.read({kBatch, 1, keys.data(), pages.data()}, Deadline::after(timeout), statuses);
    size_t n_hits = 0;
    for (size_t i = 0; i < kBatch; ++i) {
      if (statuses[i] != ReadStatus::kHit) continue;
      ++n_hits;
      for (size_t k = 0; k < nbytes_of(names[i]) / 8; ++k) CHECK(memory[i][k] == names[i]);
    }
    return n_hits;
  }
};

constexpr uint64_t kSmall = 8 << 20;
constexpr uint64_t kRoomForAll = 64 << 20;  // that are filled in, also in layout offset

DiskOptions small_options(LayoutKind layout, uint64_t capacity = kSmall) {
  DiskOptions options;
  options.capacity = capacity;
  options.layout = layout;
  options.bucket_size = 1 << 20;
  options.retry_seconds = 0.01;
  options.read_buffer = 4 << 20;
  options.release = [](const uint64_t* tickets, size_t n) {
    for (size_t i = 0; i < n; ++i) ++*reinterpret_cast<std::atomic<uint64_t>*>(tickets[i]);
  };
  return options;
}

DiskStore::Owner open(const std::string& path, const DiskOptions& options) {
  std::string error;
  auto store = DiskStore::open(path, {"n1", "ns"}, options, &error);
  if (!store) std::cerr << error << "\n";
  CHECK(store != nullptr);
  return store;
}

// The files of pages, and nothing else, fail: as often as they are told to.
class FailingPages : public FaultyFiles {
 public:
  std::atomic<int> n_failing_opens{0};
  std::atomic<int> n_failing_reads{0};
  std::atomic<int> n_failing_lists{0};
  std::atomic<int> read_error{EIO};
  std::string failing_folders = "/pages/";  // those whose path has it
  // Ends so. One block of it can't be read until it is written over.
  std::string bad_file;
  static constexpr uint64_t kBadBlock = 5 * p2pkv::disk::kBlock;

  int open(const std::string& path, int flags) override {
    if (!holds_pages(path)) return FaultyFiles::open(path, flags);
    if (take(&n_failing_opens)) return -EMFILE;
    const int fd = FaultyFiles::open(path, flags);
    const std::lock_guard lock(mutex_);
    if (fd >= 0) of_pages_.insert(fd);
    if (!bad_file.empty() && path.ends_with(bad_file)) bad_fd_ = fd;
    return fd;
  }
  int64_t read(int fd, void* to, size_t nbytes, uint64_t offset) override {
    bool is_of_pages;
    {
      const std::lock_guard lock(mutex_);
      is_of_pages = of_pages_.contains(fd);
    }
    const bool is_bad = fd == bad_fd_ && offset <= kBadBlock && offset + nbytes > kBadBlock;
    if (is_bad || (is_of_pages && take(&n_failing_reads))) return -read_error;
    return FaultyFiles::read(fd, to, nbytes, offset);
  }
  int64_t write(int fd, const void* from, size_t nbytes, uint64_t offset) override {
    if (fd == bad_fd_ && offset == kBadBlock && nbytes == p2pkv::disk::kBlock) bad_fd_ = -1;
    return FaultyFiles::write(fd, from, nbytes, offset);
  }
  int list(const std::string& path, std::vector<std::string>* names) override {
    if (path.find(failing_folders) != std::string::npos && take(&n_failing_lists)) return -EMFILE;
    return FaultyFiles::list(path, names);
  }

 private:
  static bool holds_pages(const std::string& path) {
    return path.ends_with(".seg") || path.find("/meta/") != std::string::npos;
  }
  static bool take(std::atomic<int>* n) {
    int left = n->load();
    while (left > 0 && !n->compare_exchange_weak(left, left - 1)) {
    }
    return left > 0;
  }
  std::mutex mutex_;
  std::set<int> of_pages_;
  std::atomic<int> bad_fd_{-1};
};

void wait_until(const std::function<bool()>& is_so) {
  const Deadline deadline = Deadline::after(60);
  while (!is_so() && !deadline.passed()) std::this_thread::yield();
  CHECK(is_so());
}

constexpr uint64_t kFilled = 800;  // pages, which lie in several segments

// Returns how many of them it has room for.
size_t fill(const std::string& path, LayoutKind layout, uint64_t capacity = kSmall) {
  std::atomic<uint64_t> n_released{0};
  uint64_t n_accepted = 0;
  const auto store = open(path, small_options(layout, capacity));
  while (!store->is_recovered()) std::this_thread::yield();
  for (uint64_t first = 0; first < kFilled; first += kBatch) {
    Batch batch(first);
    batch.write(*store, &n_released, &n_accepted);
    CHECK(store->flush(Deadline::after(60)));
  }
  const size_t n = store->n_pages();
  CHECK(store->close(Deadline::after(60)));
  return n;
}

size_t n_found(const std::string& path, LayoutKind layout, p2pkv::disk::Files* files) {
  DiskOptions options = small_options(layout);
  options.files = files;
  const auto store = open(path, options);
  while (!store->is_recovered()) std::this_thread::yield();
  const size_t n = store->n_pages();
  CHECK(store->close(Deadline::after(60)));
  return n;
}

TEST(disk_a_start_that_may_not_open_its_files_deletes_none) {
  for (const LayoutKind layout : {LayoutKind::kBucket, LayoutKind::kOffset}) {
    const TemporaryFolder folder;
    const size_t n_filled = fill(folder.path(), layout);
    FailingPages files;
    DiskOptions options = small_options(layout);
    options.files = &files;
    files.n_failing_opens = 1;
    std::string error;
    CHECK(DiskStore::open(folder.path(), {"n1", "ns"}, options, &error) == nullptr);
    CHECK(error.starts_with("cannot "));  // so that it is tried again
    CHECK_EQ(n_found(folder.path(), layout, &files), n_filled);
  }
}

TEST(disk_pages_that_can_not_be_read_at_the_start_are_found_by_a_later_one) {
  for (const LayoutKind layout : kLayouts) {
    for (const int n : {1, 2, 5}) {
      const TemporaryFolder folder;
      const size_t n_filled = fill(folder.path(), layout);
      FailingPages files;
      files.n_failing_reads = n;
      files.n_failing_lists = n;
      const size_t n_pages = n_found(folder.path(), layout, &files);
      // the other two look again until they have seen all
      CHECK(layout == LayoutKind::kBucket ? n_pages <= n_filled : n_pages == n_filled);
      files.n_failing_reads = 0;
      CHECK_EQ(n_found(folder.path(), layout, &files), n_filled);
    }
  }
}

// What was taken before it was known is let go, and nothing waits in vain.
TEST(disk_a_folder_that_can_not_be_looked_through_suspends_the_store_until_it_can) {
  for (const LayoutKind layout : {LayoutKind::kFile, LayoutKind::kOffset}) {
    const TemporaryFolder folder;
    const size_t n_filled = fill(folder.path(), layout, kRoomForAll);
    FailingPages files;
    files.read_error = ENOMEM;  // says nothing of the blocks
    files.n_failing_reads = files.n_failing_lists = 1 << 30;
    DiskOptions options = small_options(layout, kRoomForAll);
    options.files = &files;
    std::atomic<uint64_t> n_released{0};
    uint64_t n_accepted = 0;
    const auto began = Deadline::Clock::now();
    const auto store = open(folder.path(), options);
    Batch batch(1000);
    batch.write(*store, &n_released, &n_accepted);
    wait_until([&] { return store->health().is_suspended; });
    CHECK(store->health().reason.starts_with("cannot look through " + folder.path()));
    wait_until([&] { return n_released == n_accepted; });
    const uint64_t n_before = n_accepted;
    batch.write(*store, &n_released, &n_accepted);
    CHECK_EQ(n_accepted, n_before);
    wait_until([&] { return store->counters().read_errors >= 6; });
    // the pauses double
    CHECK(Deadline::Clock::now() - began >= std::chrono::milliseconds(10 + 20 + 40 + 80 + 160));
    CHECK(store->health().is_suspended);
    CHECK_EQ(store->counters().suspensions.load(), 1u);
    files.n_failing_reads = files.n_failing_lists = 0;
    wait_until([&] { return store->is_recovered(); });
    CHECK(!store->health().is_suspended);
    CHECK_EQ(store->n_pages(), n_filled);
    batch.write(*store, &n_released, &n_accepted);
    CHECK_EQ(n_accepted, n_before + kBatch);
    CHECK(store->close(Deadline::after(60)));
  }
}

TEST(disk_a_folder_of_pages_that_can_not_be_listed_hides_its_own_alone) {
  const TemporaryFolder folder;
  const size_t n_filled = fill(folder.path(), LayoutKind::kFile, kRoomForAll);
  FailingPages files;
  files.failing_folders = "/pages/3/";
  files.n_failing_lists = 1 << 30;
  DiskOptions options = small_options(LayoutKind::kFile, kRoomForAll);
  options.files = &files;
  const auto store = open(folder.path(), options);
  wait_until([&] { return store->health().is_suspended; });
  const size_t n_seen = store->n_pages();
  CHECK(n_seen > n_filled / 2 && n_seen < n_filled);
  size_t n_hits = 0;
  for (uint64_t first = 0; first < kFilled; first += kBatch) n_hits += Batch(first).read(*store, 10);
  CHECK_EQ(n_hits, n_seen);
  files.n_failing_lists = 0;
  wait_until([&] { return store->is_recovered(); });
  CHECK_EQ(store->n_pages(), n_filled);
  CHECK(store->close(Deadline::after(60)));
}

TEST(disk_a_bad_block_of_slots_costs_its_own_pages_alone) {
  const TemporaryFolder folder;
  const size_t n_filled = fill(folder.path(), LayoutKind::kOffset, kRoomForAll);
  FailingPages files;
  files.bad_file = "/meta/0";
  DiskOptions options = small_options(LayoutKind::kOffset, kRoomForAll);
  options.files = &files;
  std::atomic<uint64_t> n_released{0};
  uint64_t n_accepted = 0;
  auto store = open(folder.path(), options);
  wait_until([&] { return store->is_recovered(); });
  CHECK_EQ(store->counters().suspensions.load(), 1u);
  CHECK_EQ(store->counters().bad_records.load(), 1u);
  const size_t n_left = store->n_pages();
  CHECK_EQ(n_left, n_filled - p2pkv::disk::kBlock / sizeof(p2pkv::disk::MetaSlot));
  Batch batch(1000);
  batch.write(*store, &n_released, &n_accepted);
  CHECK_EQ(n_accepted, kBatch);
  CHECK(store->flush(Deadline::after(60)));
  CHECK_EQ(batch.read(*store, 10), kBatch);
  const size_t n_pages = store->n_pages();
  CHECK(store->close(Deadline::after(60)));
  store = open(folder.path(), small_options(LayoutKind::kOffset, kRoomForAll));
  wait_until([&] { return store->is_recovered(); });
  CHECK_EQ(store->n_pages(), n_pages);
  CHECK(store->close(Deadline::after(60)));
}

// Such pages are not in the index, so that nothing there tells of them.
TEST(disk_what_is_taken_back_while_nobody_can_read_it_is_gone_in_the_next_run) {
  for (const LayoutKind layout : kLayouts) {
    const TemporaryFolder folder;
    const size_t n_filled = fill(folder.path(), layout, kRoomForAll);
    FailingPages files;
    DiskOptions options = small_options(layout, kRoomForAll);
    options.files = &files;
    // the others look again until they have seen all
    files.n_failing_reads = layout == LayoutKind::kBucket ? 1000 : 2;
    auto store = open(folder.path(), options);
    while (!store->is_recovered()) std::this_thread::yield();
    CHECK_EQ(store->n_pages(), layout == LayoutKind::kBucket ? 0 : n_filled);
    files.n_failing_reads = 0;
    const Batch taken(16);
    store->forget(taken.keys.data(), taken.keys.size());
    CHECK(store->close(Deadline::after(60)));
    store = open(folder.path(), options);
    while (!store->is_recovered()) std::this_thread::yield();
    CHECK_EQ(Batch(16).read(*store, 10), 0u);
    CHECK_EQ(store->n_pages(), n_filled - kBatch);
    CHECK(store->close(Deadline::after(60)));
  }
}

TEST(disk_a_page_that_was_dropped_for_an_error_is_not_found_by_the_next_run) {
  for (const LayoutKind layout : kLayouts) {
    const TemporaryFolder folder;
    const size_t n_filled = fill(folder.path(), layout, kRoomForAll);
    FaultyFiles faults;
    DiskOptions options = small_options(layout, kRoomForAll);
    options.files = &faults;
    auto store = open(folder.path(), options);
    while (!store->is_recovered()) std::this_thread::yield();
    Batch batch(16);
    faults.fail(FileCall::kRead, EIO, kBatch - 1);
    CHECK(batch.read(*store, 10) < kBatch);
    faults.heal();
    const size_t n_left = store->n_pages();
    CHECK(n_left < n_filled);
    store->forget(batch.keys.data(), batch.keys.size());
    CHECK(store->close(Deadline::after(60)));
    store = open(folder.path(), options);
    while (!store->is_recovered()) std::this_thread::yield();
    CHECK_EQ(Batch(16).read(*store, 10), 0u);
    CHECK_EQ(store->n_pages(), n_filled - kBatch);
    CHECK(store->close(Deadline::after(60)));
  }
}

TEST(disk_what_is_taken_back_without_the_lock_is_gone_in_the_next_run) {
  for (const LayoutKind layout : kLayouts) {
    for (const bool all : {false, true}) {
      const TemporaryFolder folder;
      fill(folder.path(), layout);
      DiskOptions options = small_options(layout);
      options.retry_seconds = 60;  // so that it is closed before it looks
      auto store = open(folder.path(), options);
      while (!store->is_recovered()) std::this_thread::yield();
      std::filesystem::remove(folder.path() + "/lock");
      const Batch taken(16);
      if (all) store->clear();
      store->forget(taken.keys.data(), taken.keys.size());
      CHECK(store->close(Deadline::after(60)));
      store = open(folder.path(), options);
      while (!store->is_recovered()) std::this_thread::yield();
      CHECK_EQ(Batch(16).read(*store, 10), 0u);
      CHECK(store->close(Deadline::after(60)));
    }
  }
}

// Another version may sign its own otherwise.
TEST(disk_a_store_that_becomes_somebodys_whom_nobody_knows_is_left_to_him) {
  for (const LayoutKind layout : kLayouts) {
    const TemporaryFolder folder;
    fill(folder.path(), layout);
    const auto store = open(folder.path(), small_options(layout));
    wait_until([&] { return store->is_recovered(); });
    const std::string path = folder.path() + "/store";
    const std::string content = "p2pkv disk store\nversion=7\ncheck=of another kind\n";
    std::ofstream(path) << content;
    wait_until([&] { return store->health().reason.starts_with(path + " is damaged"); });
    CHECK(store->close(Deadline::after(60)));
    std::ostringstream left;
    left << std::ifstream(path).rdbuf();
    CHECK(left.str() == content);
  }
}

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
