// A disk store starts with files and folders that can't be read, or are no longer its own.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "disk/faulty_files.h"
#include "disk/store.h"
#include "disk_calls.h"

namespace {

using p2pkv::Deadline;
using p2pkv::disk::DiskOptions;
using p2pkv::disk::DiskStore;
using p2pkv::disk::FaultyFiles;
using p2pkv::disk::FileCall;
using p2pkv::disk::LayoutKind;
using namespace p2pkv::test;

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

// The batch that begins with page 16 was taken back; all else is found again.
void check_next_run_lacks_a_batch(DiskStore::Owner store, const std::string& path, const DiskOptions& options,
                                  size_t n_filled) {
  CHECK(store->close(Deadline::after(60)));
  store = open(path, options);
  while (!store->is_recovered()) std::this_thread::yield();
  CHECK_EQ(Batch(16).read(*store, 10), 0u);
  CHECK_EQ(store->n_pages(), n_filled - kBatch);
  CHECK(store->close(Deadline::after(60)));
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
    check_next_run_lacks_a_batch(std::move(store), folder.path(), options, n_filled);
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
    check_next_run_lacks_a_batch(std::move(store), folder.path(), options, n_filled);
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

}  // namespace
