// Reads: a batch goes to the disk together, into buffers of the store's; the caller's thread checks and
// copies.
#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>

#include "base/checksum.h"
#include "base/copy.h"
#include "codec/packed.h"
#include "disk/store.h"

namespace p2pkv::disk {
namespace {

// Of pages of one call that are under way: while one job is copied out the next is read.
constexpr size_t kJobs = 2;
constexpr size_t kMaxPages = 64;
constexpr uint64_t kMaxBytes = 8 << 20;
// In a row; then the disk is left alone until a probe works.
constexpr uint32_t kTooManyErrors = 16;

uint64_t length_of(const ReadBatch& batch, size_t page) {
  uint64_t length = 0;
  for (size_t k = page * batch.n_pieces; k < (page + 1) * batch.n_pieces; ++k)
    length += static_cast<uint64_t>(batch.pieces[k].nbytes);
  return length;
}

}  // namespace

// Pages read together. Holds their units and buffers until the last read is done, whoever still waits.
class DiskStore::ReadJob : public IoBatch {
 public:
  explicit ReadJob(Catalog* catalog) : catalog_(catalog) {}
  ~ReadJob() override {
    pages.clear();  // the buffers first: a reader waiting for one must not wait for the catalog
    for (Unit* unit : units_) catalog_->release(unit);
  }
  void hold(Unit* unit) { units_.push_back(unit); }

  struct Page {
    size_t index;  // in the caller's batch
    Place place;
    Arena::Buffer buffer;
    uint64_t skip;  // from the buffer's start to the record
  };
  std::vector<Page> pages;               // one for each op
  std::unique_ptr<PageDecoder> decoder;  // made when the first compressed page comes

 private:
  Catalog* const catalog_;
  std::vector<Unit*> units_;
};

// Keeps the store from being taken down under a call.
class DiskStore::Call {
 public:
  explicit Call(DiskStore* store) : store_(store) {
    const std::lock_guard lock(store_->mutex_);
    is_open_ = !store_->is_closed_;
    store_->n_calls_ += is_open_;
  }
  ~Call() {
    if (!is_open_) return;
    const std::lock_guard lock(store_->mutex_);
    if (--store_->n_calls_ == 0) store_->finished_.notify_all();
  }
  bool is_open() const { return is_open_; }

 private:
  DiskStore* const store_;
  bool is_open_;
};

bool DiskStore::can_read() {
  {
    const std::lock_guard lock(mutex_);
    if (health_.is_unreadable) return false;
  }
  return io_->oldest_read() < options_.stall_seconds;
}

void DiskStore::contains(const Key* keys, size_t n, uint8_t* found) {
  const Call call(this);
  if (call.is_open() && can_read()) {
    catalog_.contains(keys, n, found);
  } else {
    std::fill(found, found + n, uint8_t{0});
  }
}

void DiskStore::read(const ReadBatch& batch, const Deadline& deadline, ReadStatus* statuses) {
  const size_t n = batch.n_pages;
  std::fill(statuses, statuses + n, ReadStatus::kMiss);
  const Call call(this);
  if (call.is_open() && can_read()) {
    std::deque<std::shared_ptr<ReadJob>> jobs;
    size_t next = 0;
    while (next < n || !jobs.empty()) {
      while (next < n && jobs.size() < kJobs) {
        // waits for buffers only while it has none itself: else two calls could wait for each other
        auto job = prepare(batch, &next, jobs.empty() ? &deadline : nullptr, statuses);
        if (job == nullptr) break;
        io_->submit(job);
        jobs.push_back(std::move(job));
      }
      if (jobs.empty() && next < n && !deadline.passed()) continue;
      if (jobs.empty() || !jobs.front()->wait(deadline)) break;
      land(*jobs.front(), batch, deadline, statuses);
      jobs.pop_front();
    }
    // what is under way stays with its jobs; nobody copies it
    for (const auto& job : jobs) {
      for (const ReadJob::Page& page : job->pages) statuses[page.index] = ReadStatus::kTimedOut;
    }
    std::fill(statuses + next, statuses + n, ReadStatus::kTimedOut);
  }
  std::array<uint64_t, 4> counts{};
  for (size_t i = 0; i < n; ++i) ++counts[static_cast<size_t>(statuses[i])];
  counters_.hit_pages += counts[static_cast<size_t>(ReadStatus::kHit)];
  counters_.timed_out_pages += counts[static_cast<size_t>(ReadStatus::kTimedOut)];
  counters_.missed_pages += counts[static_cast<size_t>(ReadStatus::kMiss)];
}

std::shared_ptr<DiskStore::ReadJob> DiskStore::prepare(const ReadBatch& batch, size_t* next,
                                                       const Deadline* patience, ReadStatus* statuses) {
  const size_t n_looked_up = std::min(kMaxPages, batch.n_pages - *next);
  std::vector<Place> places(n_looked_up);
  auto job = std::make_shared<ReadJob>(&catalog_);
  catalog_.hold_pages(batch.keys + *next, n_looked_up, places.data());
  for (const Place& place : places) {
    if (place.unit != nullptr) job->hold(place.unit);
  }
  uint64_t nbytes = 0;
  bool is_full = false;
  size_t i = 0;
  for (; i < n_looked_up && !is_full; ++i) {
    const size_t index = *next + i;
    const Place& place = places[i];
    if (place.unit == nullptr) continue;
    if (!batch.place && place.length != length_of(batch, index)) {
      statuses[index] = ReadStatus::kOtherLength;
      continue;
    }
    IoOp op;
    layout_->locate(batch.keys[index], place, &op);
    const uint64_t start = op.offset / kBlock * kBlock;
    const uint64_t wanted =
        round_up(op.offset + sizeof(RecordHeader) + payload_nbytes(place.length, place.stored), kBlock) -
        start;
    if (wanted > read_arena_->nbytes()) continue;  // of a run with larger buffers
    const bool may_wait = job->pages.empty() && patience != nullptr;
    Arena::Buffer buffer = may_wait ? read_arena_->take(wanted, *patience) : read_arena_->try_take(wanted);
    if (!buffer) {
      is_full = true;
      break;
    }
    const uint64_t skip = op.offset - start;
    op.offset = start;
    op.buffer = buffer.data();
    op.nbytes = static_cast<uint32_t>(wanted);
    job->ops.push_back(std::move(op));
    job->pages.push_back({index, place, std::move(buffer), skip});
    nbytes += wanted;
    is_full = nbytes >= kMaxBytes;
  }
  *next += i;
  return job->ops.empty() ? nullptr : job;
}

void DiskStore::land(ReadJob& job, const ReadBatch& batch, const Deadline& deadline, ReadStatus* statuses) {
  for (size_t i = 0; i < job.pages.size(); ++i) {
    const ReadJob::Page& page = job.pages[i];
    if (deadline.passed()) {
      statuses[page.index] = ReadStatus::kTimedOut;
      continue;
    }
    const Key& key = batch.keys[page.index];
    if (const int64_t result = job.ops[i].result; result < 0) {
      note_failed_read(static_cast<int>(-result));
      // a file that is gone and a sector that can't be read stay so; anything else may pass
      if (result == -EIO || result == -ENOENT) drop_bad(key, page.place);
      continue;
    }
    n_failed_reads_ = 0;
    const Landing landing = copy_out(job, i, batch);
    if (landing == Landing::kRight) {
      statuses[page.index] = ReadStatus::kHit;
      counters_.hit_bytes += page.place.length;
    } else if (landing == Landing::kBad) {
      ++counters_.bad_records;
      drop_bad(key, page.place);
    }
    if (!is_direct_ && job.ops[i].fd >= 0)
      posix_fadvise(job.ops[i].fd, static_cast<off_t>(job.ops[i].offset), job.ops[i].nbytes,
                    POSIX_FADV_DONTNEED);
  }
}

// Nor will the next run find it: whoever takes the key back then would not know of it.
void DiskStore::drop_bad(const Key& key, const Place& place) {
  if (catalog_.drop(key, place)) forget(&key, 1);
}

// The page in the record, as it is or packed, if that is this key's in every respect but for the bytes, which
// have the checksum if they are right; without bytes otherwise.
DiskStore::Payload DiskStore::page_of(ReadJob& job, size_t i, const Key& key) {
  const ReadJob::Page& page = job.pages[i];
  const auto n_read = static_cast<uint64_t>(job.ops[i].result);
  if (n_read < page.skip + sizeof(RecordHeader)) return {};
  const uint8_t* from = page.buffer.data() + page.skip;
  RecordHeader header;
  std::memcpy(&header, from, sizeof header);
  if (options_.verify) {
    if (!is_signed(header, kRecordMagic) || !is_understood(header) || !(header.key == key)) return {};
    if (header.stamp != folder_->stamp() || header.length != page.place.length) return {};
    if (header.checksum != page.place.checksum) return {};
  }
  const uint64_t payload = payload_nbytes(page.place.length, header.stored);
  if (n_read - page.skip - sizeof header < payload) return {};
  from += sizeof header;
  if (header.flags == kPacked) return {from, {page.place.length, header.checksum, payload}};
  if (header.stored != 0) {
    if (!job.decoder) job.decoder = std::make_unique<PageDecoder>();
    from = job.decoder->decode(from, payload, header.flags, page.place.length);
  }
  return {from, {page.place.length, header.checksum, 0}};
}

// Brings the page to its destination, and says whether it is right there.
DiskStore::Landing DiskStore::copy_out(ReadJob& job, size_t i, const ReadBatch& batch) {
  const size_t index = job.pages[i].index;
  const Payload payload = page_of(job, i, batch.keys[index]);
  if (payload.bytes == nullptr) return Landing::kBad;
  if (batch.place) return copy_to_place(payload, index, batch);
  const Piece* const pieces = batch.pieces + index * batch.n_pieces;
  Checksum sum;
  if (payload.page.packed != 0) {
    if (!codec::unpack(payload.bytes, payload.page.packed, {pieces, batch.n_pieces}, &sum))
      return Landing::kBad;
  } else {
    const uint8_t* from = payload.bytes;
    for (size_t k = 0; k < batch.n_pieces; ++k) {
      const auto nbytes = static_cast<size_t>(pieces[k].nbytes);
      copy_and_checksum(reinterpret_cast<void*>(pieces[k].address), from, nbytes, sum);
      from += nbytes;
    }
  }
  return !options_.verify || sum.finish() == payload.page.checksum ? Landing::kRight : Landing::kBad;
}

// As it is kept, and summed before anybody makes room for it.
DiskStore::Landing DiskStore::copy_to_place(const Payload& payload, size_t index, const ReadBatch& batch) {
  const auto& [length, checksum, packed] = payload.page;
  uint64_t sum = checksum;
  if (options_.verify && packed == 0) sum = p2pkv::checksum(payload.bytes, length);
  if (packed != 0 && !codec::checksum_packed(payload.bytes, packed, length, &sum)) return Landing::kBad;
  if (options_.verify && sum != checksum) return Landing::kBad;
  uint8_t* const to = batch.place(index, payload.page);
  if (to == nullptr) return Landing::kNowhere;
  copy_bytes(to, payload.bytes, packed != 0 ? packed : length);
  return Landing::kRight;
}

void DiskStore::note_failed_read(int error) {
  ++counters_.read_errors;
  if (++n_failed_reads_ < kTooManyErrors) return;
  const std::lock_guard lock(mutex_);
  if (health_.is_unreadable) return;
  ++counters_.suspensions;
  health_.is_unreadable = true;
  health_.reason = "cannot read in " + folder_->path() + ": " + std::strerror(error);
}

}  // namespace p2pkv::disk
