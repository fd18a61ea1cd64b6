#include "disk/store.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>

#include "disk/waiting.h"

namespace p2pkv::disk {
namespace {

// Two chunks under way while a third is filled.
constexpr uint64_t kLargestChunk = 4 << 20;
// Bytes of the file that says what was taken back; of a large store a 512th, so that it has room for many
// times the pages that are retracted one by one while their segment lives.
constexpr uint64_t kLeastRecalls = 32 << 10;
constexpr uint64_t kMostRecalls = 4 << 20;
// How long a store that nobody closed may take to write what is queued.
constexpr double kLastWords = 5;

}  // namespace

void DiskStore::Dispose::operator()(DiskStore* store) const {
  // A forked child has neither the threads nor the lock. Where the disk hangs the kernel may still write to
  // the buffers. In both cases: leak.
  if (getpid() == pid && store->close(Deadline::after(kLastWords))) delete store;
}

DiskStore::Owner DiskStore::open(const std::string& path, const DiskIdentity& identity,
                                 const DiskOptions& options, std::string* error) {
  Owner store(new DiskStore(options));
  *error = store->start(path, identity);
  if (!error->empty()) return nullptr;
  return store;
}

DiskStore::~DiskStore() = default;

std::string DiskStore::start(const std::string& path, const DiskIdentity& identity) {
  std::string error;
  folder_ = Folder::open(path, identity, options_.layout, *options_.files, &error);
  if (!folder_) return error;
  read_arena_ = Arena::create(round_up(options_.read_buffer, kBlock));
  write_arena_ = Arena::create(std::max(3 * kLargestChunk, round_up(options_.read_buffer, kBlock)));
  if (!read_arena_ || !write_arena_) return "no memory for the disk's buffers";
  if (options_.allow_direct && !probe_direct(&error)) return error;
  if (options_.allow_uring && options_.files->allows_bypass() && options_.layout != LayoutKind::kFile)
    io_ = uring_io({read_arena_.get(), write_arena_.get()}, &error);
  if (!io_) io_ = thread_io(*options_.files);
  if (!io_) return "the system has no thread to give";
  io_name_ = io_->name();
  if (error = open_recalls(); !error.empty()) return error;
  Backing backing{*options_.files,  *io_,       catalog_,  recalls_,     counters_, options_, folder_->path(),
                  folder_->stamp(), is_direct_, overhead_, is_stopping_, is_lost_};
  switch (options_.layout) {
    case LayoutKind::kFile:
      layout_ = file_layout(std::move(backing));
      break;
    case LayoutKind::kOffset:
      layout_ = offset_layout(std::move(backing));
      break;
    default:
      layout_ = bucket_layout(std::move(backing));
  }
  if (error = layout_->open(); !error.empty()) return error;
  if (options_.compression == Compression::kZstd) {
    if (error = zstd_missing(); !error.empty()) return error;
    encoder_ = std::make_unique<PageEncoder>();
  }
  // two must fit into the buffers, with their headers and the rest of their blocks
  largest_page_ = std::min(layout_->largest_page(), options_.read_buffer / 2 - 2 * kBlock);
  // large chunks are fast, but what doesn't fit at the end of a segment is lost to it
  chunk_nbytes_ = std::min(kLargestChunk, std::max(layout_->largest_page() / 16, kBlock));
  return start_threads() ? "" : "the system has no thread to give";
}

// Small enough for the overhead, but where pages that were taken back stay on disk for long.
std::string DiskStore::open_recalls() {
  uint64_t nbytes = kLeastRecalls;
  if (options_.layout == LayoutKind::kBucket)
    nbytes = round_up(std::clamp(options_.capacity / 512, kLeastRecalls, kMostRecalls), kBlock);
  overhead_ = kOverhead + 2 * (nbytes - kLeastRecalls);  // twice: it is replaced by another
  bool is_damaged = false;
  const std::string path = folder_->path() + "/recalls";
  const int opened = recalls_.open(*options_.files, path, folder_->stamp(), nbytes, &is_damaged);
  counters_.bad_records += is_damaged;
  return opened < 0 ? "cannot use " + path + ": " + std::strerror(-opened) : "";
}

bool DiskStore::probe_direct(std::string* error) {
  Files& files = *options_.files;
  const std::string path = folder_->path() + "/probe";
  const UniqueFd fd(files.open(path, O_RDWR | O_CREAT | O_TRUNC | O_DIRECT));
  if (fd.get() == -EINVAL || fd.get() == -EOPNOTSUPP) return true;  // this file system only knows its cache
  AlignedBytes block(kBlock);
  int64_t done = fd.get();
  if (done >= 0) done = files.write(fd.get(), block.data(), kBlock, 0);
  if (done >= 0) done = files.read(fd.get(), block.data(), kBlock, 0);
  files.remove(path);
  is_direct_ = done == static_cast<int64_t>(kBlock);
  if (done >= 0 || done == -EINVAL) return true;
  *error = "cannot write to " + folder_->path() + ": " + std::strerror(static_cast<int>(-done));
  return false;
}

bool DiskStore::start_threads() {
  n_threads_ = 2;
  const bool has_scanner = scanner_.start("p2pkv-disk-scan", [this] {
    recover();
    end_thread();
  });
  const bool has_writer = has_scanner && writer_.start("p2pkv-disk-write", [this] {
    write_all();
    end_thread();
  });
  const std::lock_guard lock(mutex_);
  n_threads_ -= !has_scanner + !has_writer;
  return has_writer;
}

// While not all has been seen no page is placed, so that to take any would only fill the queue.
void DiskStore::recover() {
  double backoff = options_.retry_seconds;
  for (int done; (done = layout_->recover()) < 0; backoff = std::min(2 * backoff, kLongestBackoff)) {
    ++counters_.read_errors;
    std::unique_lock lock(mutex_);
    counters_.suspensions += is_refusing() ? 0U : 1U;
    unseen_ = "cannot look through " + folder_->path() + ": " + std::strerror(-done);
    wanted_.notify_all();
    const Deadline next = Deadline::after(backoff);
    if (wait_until(wanted_, lock, next, [this] { return is_stopping_.load(); })) return;
    lock.unlock();
    if (folder_->is_intact()) continue;
    is_lost_ =
        true;  // nothing more of it is seen, and whoever has it by now keeps it: the writer makes it again
    break;
  }
  // under the lock, or the writer might miss it between its look and its wait
  const std::lock_guard lock(mutex_);
  // One that was cut short has not met all records, and knows no order above theirs.
  if (is_stopping_) return;
  is_recovered_ = true;
  unseen_.clear();
  wanted_.notify_all();
}

void DiskStore::end_thread() {
  const std::lock_guard lock(mutex_);
  --n_threads_;
  finished_.notify_all();
}

bool DiskStore::flush(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  if (is_closed_) return false;
  const uint64_t goal = n_accepted_;
  wants_flush_ = n_synced_ < goal;
  wanted_.notify_all();
  return wait_until(finished_, lock, deadline, [&] { return n_synced_ >= goal; });
}

bool DiskStore::close(const Deadline& deadline) {
  {
    std::unique_lock lock(mutex_);
    if (is_gone_) return true;
    is_closed_ = true;
    wanted_.notify_all();
    // once the queue is written, or the time is over, nothing more is taken up
    wait_until(finished_, lock, deadline, [this] { return n_settled_ == n_accepted_ || n_threads_ == 0; });
    is_stopping_ = true;
    wanted_.notify_all();
    const auto is_over = [this] { return n_threads_ == 0 && n_calls_ == 0; };
    // the threads have little left to do unless the disk hangs
    const Deadline patience = Deadline::after(std::max(1.0, deadline.poll_ms() * 1e-3));
    if (!wait_until(finished_, lock, patience, is_over)) return false;
  }
  catalog_.close();
  if (io_ && !io_->drain(Deadline::after(1))) return false;
  writer_.join();
  scanner_.join();
  recalls_.close();
  layout_.reset();
  io_.reset();
  catalog_.clear();
  folder_.reset();
  const std::lock_guard lock(mutex_);
  is_gone_ = true;
  return true;
}

DiskHealth DiskStore::health() const {
  const std::lock_guard lock(mutex_);
  DiskHealth health = health_;
  health.is_suspended = is_refusing();
  if (health.reason.empty()) health.reason = unseen_;
  return health;
}

uint64_t DiskStore::queued_bytes() const {
  const std::lock_guard lock(mutex_);
  return queued_bytes_;
}

}  // namespace p2pkv::disk
