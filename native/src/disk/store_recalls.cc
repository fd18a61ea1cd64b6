// What is taken back: in memory at once, on disk as soon as the writer gets to it.
#include <algorithm>

#include "disk/store.h"
#include "disk/waiting.h"

namespace p2pkv::disk {

void DiskStore::forget(const Key* keys, size_t n) {
  // first: whatever comes into the index from now on was looked at later, or is left out
  recalls_.recall(keys, n);
  bool may_be_there = !is_recovered_ || catalog_.has_retired() || catalog_.has_unread();
  {
    const std::lock_guard lock(mutex_);
    may_be_there = may_be_there || n_settled_ < n_accepted_;
  }
  std::vector<uint8_t> had(n);
  catalog_.forget_keys(keys, n, had.data());
  for (size_t i = 0; i < n; ++i) {
    if (may_be_there || had[i] != 0) recalls_.keep(keys[i]);
  }
  wake_writer();
}

void DiskStore::clear() {
  recalls_.recall_all();
  catalog_.forget_all_keys();
  wake_writer();
}

void DiskStore::wake_writer() {
  const std::lock_guard lock(mutex_);  // or it might miss it between its look and its wait
  wanted_.notify_all();
}

bool DiskStore::wait_recalled(const Deadline& deadline) {
  // What is being written at this moment is pending no more, and is not on disk yet.
  const uint64_t n_kept = recalls_.n_kept();
  std::unique_lock lock(mutex_);
  wait_until(finished_, lock, deadline, [&] { return is_closed_ || n_written_ >= n_kept; });
  return n_written_ >= n_kept;
}

// Before anything else is placed: what is taken back holds for all records that lie there by now.
void DiskStore::record_recalls() {
  const uint64_t n_kept = recalls_.n_kept();
  const int written = write_recalls();
  drop_cleared();
  // a full disk may have room now
  const bool is_written = written >= 0 || (written != -ENOBUFS && write_recalls() >= 0);
  if (!is_written) suspend("cannot write what was taken back", written == -ENOBUFS ? -ENOSPC : written);
  n_recorded_ = n_kept;
  {
    const std::lock_guard lock(mutex_);
    if (is_written) n_written_ = n_kept;
  }
  finished_.notify_all();
}

int DiskStore::write_recalls() {
  // the file is somebody else's if he has the folder by now
  if (recalls_.is_pending() && !is_folder_intact()) return -ENOENT;
  const bool is_known = may_place();
  if (recalls_.is_pending()) finish_all();
  const bool is_clear = recalls_.cleared() != dropped_at_;
  int written = recalls_.write(is_known ? layout_->next_order() : Recalls::kEverything,
                               is_known ? layout_->oldest_order() : 0);
  if (written == -ENOBUFS) {
    // Too much was taken back one by one while its segments live. A doubt is a miss, for all of them.
    clear();
    written = recalls_.write(is_known ? layout_->next_order() : Recalls::kEverything, 0);
  }
  const FsyncPolicy least = is_clear ? FsyncPolicy::kSeal : FsyncPolicy::kBatch;
  if (written >= 0 && options_.fsync >= least) written = recalls_.sync();
  return written;
}

void DiskStore::drop_cleared() {
  const uint64_t cleared = recalls_.cleared();
  if (cleared == dropped_at_) return;
  dropped_at_ = cleared;
  finish_all();
  layout_->abandon();
  catalog_.retire_all();
  if (may_place()) layout_->delete_due(Deadline::after(0));
}

// The last resort of a disk that takes no writes: without its pages nobody can find one that was taken back.
void DiskStore::leave_nothing_recalled() {
  layout_->abandon();
  catalog_.retire_all();
}

}  // namespace p2pkv::disk
