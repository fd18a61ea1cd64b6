// The writer's thread: takes pages from the queue, gives their memory back, and brings them to disk.
#include <fcntl.h>

#include <algorithm>
#include <cstring>

#include "base/checksum.h"
#include "codec/packed.h"
#include "disk/store.h"
#include "disk/waiting.h"

namespace p2pkv::disk {
namespace {

constexpr size_t kChunksUnderWay = 2;
constexpr size_t kMaxRecords = 4096;  // of a chunk; bounds what is taken from the queue at once
// How often the writer looks whether the folder is still there, in times of `retry_seconds`.
constexpr double kLookEvery = 5;
// How long the disk may take for one chunk before it counts as broken.
constexpr double kWritePatience = 30;
constexpr double kClosePatience = 1;

// Pages wait for the publisher to pause, because copying them takes a core and memory's bandwidth from it:
// for this long without a write, or until the oldest has waited so long, or three quarters of the queue are
// full. Longer than a publish of 8 MiB takes, shorter than an engine computes between two. Guesses; not
// tuned.
constexpr std::chrono::milliseconds kPause{3};
constexpr std::chrono::milliseconds kLongestWait{20};

// A slot of layout `offset` counts the blocks of a record that is shorter than its page in 16 bits.
constexpr bool may_be_shorter(uint64_t nbytes) {
  return record_nbytes(nbytes) <= UINT16_MAX * kBlock;
}

}  // namespace

void DiskStore::write(const WriteBatch& batch, uint8_t* accepted) {
  bool is_news = false;  // else the writer knows already when to look again
  {
    const std::lock_guard lock(mutex_);
    const bool was_empty = queue_.empty();
    const bool was_urgent = is_urgent();
    last_write_ = Deadline::Clock::now();
    const bool is_open = !is_closed_ && !is_refusing();
    for (size_t i = 0; i < batch.n_pages; ++i) {
      const auto nbytes = static_cast<uint64_t>(batch.pages[i].nbytes);
      const bool is_small = nbytes <= largest_page_ && batch.lengths[i] <= UINT32_MAX &&
                            (batch.lengths[i] == nbytes || may_be_shorter(nbytes));
      accepted[i] = is_open && is_small && queued_bytes_ + nbytes <= options_.queue_size;
      if (!accepted[i]) {
        ++counters_.refused_pages;
        continue;
      }
      queue_.push_back({batch.keys[i], reinterpret_cast<const uint8_t*>(batch.pages[i].address),
                        static_cast<uint32_t>(nbytes), static_cast<uint32_t>(batch.lengths[i]),
                        batch.checksums[i], batch.tickets[i], last_write_, batch.since});
      ++n_accepted_;
      queued_bytes_ += nbytes;
    }
    is_news = was_empty != queue_.empty() || was_urgent != is_urgent();
  }
  if (is_news) wanted_.notify_all();
}

void DiskStore::write_all() {
  std::vector<Pending> batch;
  while (wait_for_work(&batch)) {
    look_after_folder();
    if (must_probe()) try_to_resume();
    record_recalls();
    if (health().is_suspended) {
      discard(batch);
    } else if (!batch.empty()) {
      if (const std::shared_ptr<Chunk> chunk = fill(batch); chunk != nullptr) put(chunk);
    }
    // recovery still deals out the room, where it comes first
    if (may_place()) layout_->delete_due(Deadline::after(0));
    if (is_queue_empty()) {
      finish_all();
      flush_layout();
    }
  }
  finish_all();
  discard(batch);
  if (!is_folder_intact()) return let_go_of_folder();
  record_recalls();
  if (recalls_.is_pending()) leave_nothing_recalled();
  if (may_place()) layout_->delete_due(Deadline::after(0));
  if (const int sealed = layout_->seal(); sealed < 0) ++counters_.write_errors;
}

// The last act where files were deleted and not made again. Whoever has the folder by now keeps what is
// there; if nobody has, no page may be left of which this process could not write that it was taken back.
void DiskStore::let_go_of_folder() {
  std::string error;
  const bool is_there = options_.files->nbytes(folder_->path() + "/store", false) >= 0;
  if (!is_there || folder_->restore(&error) < 0) return;
  is_lost_ = false;
  leave_nothing_recalled();
  if (may_place()) layout_->delete_due(Deadline::after(0));
}

bool DiskStore::wait_for_work(std::vector<Pending>* batch) {
  batch->clear();
  std::unique_lock lock(mutex_);
  const bool needs_attention = health_.is_suspended || health_.is_unreadable;
  const Deadline& look = needs_attention && next_probe_.at() < next_look_.at() ? next_probe_ : next_look_;
  while (!is_stopping_ && recalls_.n_kept() == n_recorded_ && !(wants_flush_ && queue_.empty())) {
    const Deadline next = Deadline::until(next_work(look.at()));
    if (next.passed()) break;
    wait_once(wanted_, lock, next);
  }
  const bool may_take = is_stopping_ || is_refusing() || may_place();
  uint64_t nbytes = 0;
  while (may_take && !queue_.empty() && (is_stopping_ || batch->size() < kMaxRecords)) {
    const uint64_t record = round_up(record_nbytes(queue_.front().nbytes), layout_->alignment());
    if (!is_stopping_ && !batch->empty() && nbytes + record > chunk_nbytes_) break;
    nbytes += record;
    batch->push_back(queue_.front());
    queue_.pop_front();
  }
  return !is_stopping_;
}

// With the lock.
bool DiskStore::is_urgent() const {
  return queued_bytes_ >= options_.queue_size / 4 * 3 || is_closed_ || wants_flush_;
}

// With the lock. When what is queued should be written, if anything is.
Deadline::Clock::time_point DiskStore::next_work(Deadline::Clock::time_point otherwise) const {
  if (queue_.empty() || !(may_place() || is_refusing())) return otherwise;
  const auto oldest = queue_.front().queued_at;
  if (is_urgent()) return oldest;
  return std::min({otherwise, last_write_ + kPause, oldest + kLongestWait});
}

bool DiskStore::is_queue_empty() {
  const std::lock_guard lock(mutex_);
  return queue_.empty();
}

void DiskStore::settle(size_t n_pages, uint64_t nbytes) {
  {
    const std::lock_guard lock(mutex_);
    n_settled_ += n_pages;
    queued_bytes_ -= nbytes;
  }
  finished_.notify_all();
}

void DiskStore::discard(const std::vector<Pending>& batch) {
  if (batch.empty()) return;
  std::vector<uint64_t> tickets;
  uint64_t nbytes = 0;
  for (const Pending& pending : batch) {
    tickets.push_back(pending.ticket);
    nbytes += pending.nbytes;
  }
  options_.release(tickets.data(), tickets.size());
  counters_.lost_pages += batch.size();
  settle(batch.size(), nbytes);
}

std::shared_ptr<Chunk> DiskStore::fill(const std::vector<Pending>& batch) {
  std::vector<Key> keys;
  uint64_t nbytes = 0;
  for (const Pending& pending : batch) {
    keys.push_back(pending.key);
    nbytes += round_up(record_nbytes(pending.nbytes), layout_->alignment());
  }
  std::vector<uint8_t> known(keys.size());
  std::vector<CatalogEntry> entries(keys.size());
  catalog_.look_up(keys.data(), keys.size(), known.data(), entries.data());
  auto chunk = std::make_shared<Chunk>();
  while (!(chunk->buffer = write_arena_->try_take(nbytes)) && !under_way_.empty()) finish_oldest();
  if (!chunk->buffer) {
    discard(batch);
    return nullptr;
  }
  uint8_t* const base = chunk->buffer.data();
  uint64_t end = 0;
  std::vector<uint64_t> tickets;
  uint64_t queued = 0;
  size_t n_settled = 0;
  for (size_t i = 0; i < batch.size(); ++i) {
    const Pending& page = batch[i];
    tickets.push_back(page.ticket);
    queued += page.nbytes;
    // with other bytes it is an earlier one, written while this one was published
    const bool is_known = known[i] != 0 && entries[i].place.checksum == page.checksum;
    if (is_known || recalls_.is_recalled(page.key, page.since)) {
      counters_.known_pages += is_known;
      ++n_settled;
      continue;
    }
    uint8_t* const payload = base + end + sizeof(RecordHeader);
    const bool is_packed = page.nbytes != page.length;
    const bool is_encoded = encoder_ && !is_packed;
    uint8_t* const copy = is_encoded ? copy_of(page.length) : payload;
    if (!copy_pending(page, copy)) {
      // its pin ended and the block was used again: these are some other page's bytes
      ++counters_.changed_pages;
      ++n_settled;
      continue;
    }
    RecordHeader header = header_of(page.key, page.length, page.checksum, folder_->stamp());
    if (is_encoded) encode(copy, &header, payload);
    if (is_packed) {
      header.stored = page.nbytes;
      header.flags = kPacked;
      sign(&header);
    }
    std::memcpy(base + end, &header, sizeof header);
    chunk->records.push_back({page.key, page.checksum, page.length, header.stored, end, page.since});
    const uint64_t used = end + sizeof header + payload_nbytes(page.length, header.stored);
    end = round_up(used, layout_->alignment());
    std::memset(base + used, 0, end - used);
  }
  options_.release(tickets.data(), tickets.size());
  settle(n_settled, queued);
  if (chunk->records.empty()) return nullptr;
  chunk->nbytes = round_up(end, kBlock);
  std::memset(base + end, 0, chunk->nbytes - end);
  return chunk;
}

// False if these are not the page's bytes any more.
bool DiskStore::copy_pending(const Pending& page, uint8_t* to) {
  Checksum sum;
  copy_and_checksum(to, page.page, page.nbytes, sum);
  uint64_t of_page = sum.finish();
  if (page.nbytes != page.length && !codec::checksum_packed(to, page.nbytes, page.length, &of_page))
    return false;
  return of_page == page.checksum;
}

uint8_t* DiskStore::copy_of(size_t nbytes) {
  if (copy_.size() < nbytes) copy_.resize(nbytes);
  return copy_.data();
}

// Writes the page to `payload`, smaller if that pays, and says so in the header.
void DiskStore::encode(const uint8_t* page, RecordHeader* header, uint8_t* payload) {
  header->stored =
      may_be_shorter(header->length)
          ? static_cast<uint32_t>(encoder_->encode(page, header->length, payload, &header->flags))
          : 0;
  if (header->stored == 0) {
    std::memcpy(payload, page, header->length);
  } else {
    sign(header);
  }
}

void DiskStore::put(const std::shared_ptr<Chunk>& chunk) {
  if (layout_->must_settle_before(*chunk)) finish_all();
  if (const int begun = layout_->begin(chunk); begun < 0) {
    counters_.lost_pages += chunk->records.size();
    settle(chunk->records.size(), 0);
    if (begun != -ENOBUFS) suspend("cannot make room", begun);
    return;
  }
  under_way_.push_back(chunk);
  if (under_way_.size() >= kChunksUnderWay) finish_oldest();
}

void DiskStore::finish_oldest() {
  const std::shared_ptr<Chunk> chunk = under_way_.front();
  under_way_.pop_front();
  const bool is_done = chunk->wait(Deadline::after(kWritePatience));
  if (!is_done) {
    // Its place must not be used again while the kernel may still write there: the layout never hears of it.
    suspend("a write does not end", -ETIMEDOUT);
    counters_.lost_pages += chunk->records.size();
  } else if (const int finished = layout_->finish(*chunk); finished < 0) {
    counters_.lost_pages += chunk->records.size();
    suspend("cannot write", finished);
  } else {
    uint64_t nbytes = 0;
    for (const Chunk::Record& record : chunk->records) {
      nbytes += record.length;
      counters_.written_bytes += payload_nbytes(record.length, record.stored);
    }
    counters_.stored_pages += chunk->records.size();
    counters_.stored_bytes += nbytes;
    backoff_ = 0;
  }
  // also when it failed: a layout with a file a page has those before the one that it could not write
  if (is_done) {
    std::vector<Key> keys;
    for (const Chunk::Record& record : chunk->records) keys.push_back(record.key);
    options_.stored(keys.data(), keys.size());
  }
  settle(chunk->records.size(), 0);
}

void DiskStore::finish_all() {
  while (!under_way_.empty()) finish_oldest();
}

void DiskStore::flush_layout() {
  uint64_t n_settled;
  {
    const std::lock_guard lock(mutex_);
    if (!wants_flush_ || !queue_.empty()) return;
    n_settled = n_settled_;
  }
  if (options_.fsync != FsyncPolicy::kNever && !health().is_suspended) {
    if (const int synced = layout_->sync(); synced < 0) suspend("cannot sync", synced);
  }
  {
    const std::lock_guard lock(mutex_);
    n_synced_ = n_settled;
    wants_flush_ = n_synced_ < n_accepted_;
  }
  finished_.notify_all();
}

void DiskStore::suspend(const char* what, int error) {
  ++counters_.write_errors;
  backoff_ = backoff_ == 0 ? options_.retry_seconds : std::min(2 * backoff_, kLongestBackoff);
  next_probe_ = Deadline::after(backoff_);
  const std::lock_guard lock(mutex_);
  if (health_.is_suspended) return;
  counters_.suspensions += is_refusing() ? 0U : 1U;
  health_.is_suspended = true;
  health_.reason = std::string(what) + " in " + folder_->path() + ": " + std::strerror(-error);
}

// Not while only the scanner waits for the disk: it tries again by itself.
bool DiskStore::must_probe() {
  const std::lock_guard lock(mutex_);
  return health_.is_suspended || health_.is_unreadable;
}

void DiskStore::try_to_resume() {
  if (!next_probe_.passed()) return;
  const int probed = probe();
  if (probed < 0 && probed != -ENOBUFS) {
    backoff_ = backoff_ == 0 ? options_.retry_seconds : std::min(2 * backoff_, kLongestBackoff);
    next_probe_ = Deadline::after(backoff_);
    return;
  }
  n_failed_reads_ = 0;
  const std::lock_guard lock(mutex_);
  health_ = {};
}

int DiskStore::probe() {
  if (!is_folder_intact()) {
    if (const int restored = restore_folder(); restored < 0) return restored;
  }
  Files& files = *options_.files;
  const std::string path = folder_->path() + "/probe";
  const AlignedBytes block(kBlock);
  int64_t done;
  {
    const UniqueFd fd(files.open(path, O_RDWR | O_CREAT | O_TRUNC | (is_direct_ ? O_DIRECT : 0)));
    done = fd.get();
    if (done >= 0) done = files.write(fd.get(), block.data(), kBlock, 0);
    if (done >= 0) done = files.sync(fd.get());
    if (done >= 0) done = files.read(fd.get(), block.data(), kBlock, 0);
  }
  files.remove(path);
  return done < 0 ? static_cast<int>(done) : layout_->prepare();
}

void DiskStore::look_after_folder() {
  if (!next_look_.passed()) return;
  next_look_ = Deadline::after(kLookEvery * options_.retry_seconds);
  {
    const std::lock_guard lock(mutex_);
    if (health_.is_suspended) return;
  }
  if (is_folder_intact()) return;
  finish_all();
  suspend("files were deleted", -ENOENT);
}

bool DiskStore::is_folder_intact() {
  if (!must_restore_ && (is_lost_ || !folder_->is_intact())) must_restore_ = is_lost_ = true;
  return !must_restore_;
}

int DiskStore::restore_folder() {
  // Recovery walks the same folder.
  if (!is_recovered_) return -EBUSY;
  {
    // nobody may be reading from the files that are closed below
    std::unique_lock lock(mutex_);
    health_.is_unreadable = true;
    if (!wait_until(finished_, lock, Deadline::after(kClosePatience), [this] { return n_calls_ == 0; }))
      return -EBUSY;
  }
  if (!io_->drain(Deadline::after(kClosePatience))) return -EBUSY;
  // Before anything is deleted: files of the same names are somebody else's if he has the folder by now.
  std::string error;
  if (const int restored = folder_->restore(&error); restored < 0) {
    const std::lock_guard lock(mutex_);
    health_.reason = error;
    return restored;
  }
  is_lost_ = false;
  catalog_.retire_all();
  layout_->delete_due(Deadline::after(0));
  layout_->reset();
  // Who had the folder in between may have left pages there, and said in a file that is replaced here which
  // of them were taken back.
  recalls_.recall_all();
  if (const int written = recalls_.restore(); written < 0) return written;
  if (!layout_->open().empty()) return -EIO;
  if (const int recovered = layout_->recover(); recovered < 0) return recovered;
  must_restore_ = false;
  return 0;
}

}  // namespace p2pkv::disk
