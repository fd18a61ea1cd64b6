// Reads: a batch goes to the disk together, into buffers of the store's; the caller's thread checks and
// copies what has come while the rest is on its way.
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

// Looked up at once.
constexpr size_t kMaxPages = 64;
// Read by one operation, and waited for and copied together, if one page is not more. Smaller parts are
// copied while others are read, and cost as much in threads that are woken.
constexpr uint64_t kJobBytes = 2 << 20;
// Of one call under way.
constexpr uint64_t kMaxBytes = 16 << 20;
// In a row; then the disk is left alone until a probe works.
constexpr uint32_t kTooManyErrors = 16;

uint64_t length_of(const ReadBatch& batch, size_t page) {
  uint64_t length = 0;
  for (size_t k = page * batch.n_pieces; k < (page + 1) * batch.n_pieces; ++k)
    length += static_cast<uint64_t>(batch.pieces[k].nbytes);
  return length;
}

}  // namespace

// Operations whose pages are copied together. Holds their units and buffers until the last one is done,
// whoever still waits.
class DiskStore::ReadJob : public IoBatch {
 public:
  struct Page {
    size_t index;  // in the caller's batch
    Place place;   // held
    size_t op;
    uint64_t skip;  // from the buffer's start to the record
  };

  explicit ReadJob(Catalog* catalog) : catalog_(catalog) {}
  ~ReadJob() override {
    buffers.clear();  // first: a reader waiting for one must not wait for the catalog
    for (const Page& page : pages) catalog_->release(page.place.unit);
  }
  uint64_t nbytes() const {
    uint64_t sum = 0;
    for (const IoOp& op : ops) sum += op.nbytes;
    return sum;
  }

  std::vector<Arena::Buffer> buffers;  // one for each op
  std::vector<Page> pages;             // in the order of their ops

 private:
  Catalog* const catalog_;
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

// One call of `read`. Pages that lie beside each other on disk, in the order in which they are asked for, are
// read by one operation; if that fails, each by its own, so that none suffers for its neighbour.
class DiskStore::Reading {
 public:
  Reading(DiskStore* store, const ReadBatch& batch, const Deadline& deadline, ReadStatus* statuses)
      : store_(*store),
        batch_(batch),
        deadline_(deadline),
        statuses_(statuses),
        job_nbytes_(std::min(kJobBytes, store->read_arena_->nbytes() / 4)) {}
  ~Reading() {
    for (const Row& row : rows_) store_.catalog_.release(row.place.unit);
  }

  void run();

 private:
  // A page that was found, and is not being read yet.
  struct Row {
    size_t index;
    Place place;    // held
    IoOp op;        // that reads it alone
    uint64_t skip;  // from where that begins to the record
    bool is_alone;
  };
  enum class Landing : uint8_t { kRight, kBad, kNowhere };
  struct Payload {
    const uint8_t* bytes = nullptr;
    ReadBatch::Found page{};
  };

  bool is_over() const { return next_ == batch_.n_pages && rows_.empty() && alone_.empty(); }
  void start_jobs();
  void look_up();
  void add_row(size_t index, const Place& place, bool is_alone);
  std::shared_ptr<ReadJob> prepare(bool may_wait);
  IoOp join_rows(size_t* n) const;
  void land(const ReadJob& job);
  void settle(const ReadJob::Page& page, Landing landing);
  Landing copy_out(const ReadJob& job, const ReadJob::Page& page);
  Landing copy_to_place(const Payload& payload, size_t index);
  Payload page_of(const ReadJob& job, const ReadJob::Page& page);

  DiskStore& store_;
  const ReadBatch& batch_;
  const Deadline& deadline_;
  ReadStatus* const statuses_;
  const uint64_t job_nbytes_;
  size_t next_ = 0;            // page of the batch to be looked up
  std::vector<size_t> alone_;  // pages to be looked up and read again
  std::deque<Row> rows_;
  std::deque<std::shared_ptr<ReadJob>> jobs_;  // under way
  uint64_t under_way_ = 0;                     // their bytes
  std::unique_ptr<PageDecoder> decoder_;       // made when the first compressed page comes
};

void DiskStore::read(const ReadBatch& batch, const Deadline& deadline, ReadStatus* statuses) {
  const size_t n = batch.n_pages;
  std::fill(statuses, statuses + n, ReadStatus::kMiss);
  const Call call(this);
  if (call.is_open() && can_read()) Reading(this, batch, deadline, statuses).run();
  std::array<uint64_t, 4> counts{};
  for (size_t i = 0; i < n; ++i) ++counts[static_cast<size_t>(statuses[i])];
  counters_.hit_pages += counts[static_cast<size_t>(ReadStatus::kHit)];
  counters_.timed_out_pages += counts[static_cast<size_t>(ReadStatus::kTimedOut)];
  counters_.missed_pages += counts[static_cast<size_t>(ReadStatus::kMiss)];
}

void DiskStore::Reading::run() {
  while (true) {
    start_jobs();
    if (jobs_.empty() && (is_over() || deadline_.passed())) break;
    if (jobs_.empty()) continue;
    if (!jobs_.front()->wait(deadline_)) break;
    land(*jobs_.front());
    under_way_ -= jobs_.front()->nbytes();
    jobs_.pop_front();
  }
  // what is under way stays with its jobs; nobody copies it
  for (const auto& job : jobs_) {
    for (const ReadJob::Page& page : job->pages) statuses_[page.index] = ReadStatus::kTimedOut;
  }
  for (const Row& row : rows_) statuses_[row.index] = ReadStatus::kTimedOut;
  for (const size_t index : alone_) statuses_[index] = ReadStatus::kTimedOut;
  std::fill(statuses_ + next_, statuses_ + batch_.n_pages, ReadStatus::kTimedOut);
}

void DiskStore::Reading::start_jobs() {
  while (under_way_ < kMaxBytes) {
    // waits for buffers only while it has none itself: else two calls could wait for each other
    const std::shared_ptr<ReadJob> job = prepare(jobs_.empty());
    if (job == nullptr) return;
    under_way_ += job->nbytes();
    store_.io_->submit(job);
    jobs_.push_back(job);
  }
}

// Finds the next pages, and skips those that are not there.
void DiskStore::Reading::look_up() {
  const bool is_alone = next_ == batch_.n_pages;
  std::vector<size_t> indices;
  for (; !is_alone && next_ < batch_.n_pages && indices.size() < kMaxPages; ++next_) indices.push_back(next_);
  if (is_alone) indices.swap(alone_);
  std::vector<Key> keys;
  for (const size_t index : indices) keys.push_back(batch_.keys[index]);
  std::vector<Place> places(keys.size());
  store_.catalog_.hold_pages(keys.data(), keys.size(), places.data());
  for (size_t i = 0; i < indices.size(); ++i) {
    if (places[i].unit != nullptr) add_row(indices[i], places[i], is_alone);
  }
}

void DiskStore::Reading::add_row(size_t index, const Place& place, bool is_alone) {
  if (!batch_.place && place.length != length_of(batch_, index)) {
    statuses_[index] = ReadStatus::kOtherLength;
    return store_.catalog_.release(place.unit);
  }
  IoOp op;
  store_.layout_->locate(batch_.keys[index], place, &op);
  const uint64_t start = op.offset / kBlock * kBlock;
  const uint64_t skip = op.offset - start;
  const uint64_t wanted =
      round_up(skip + sizeof(RecordHeader) + payload_nbytes(place.length, place.stored), kBlock);
  // of a run with larger buffers
  if (wanted > store_.read_arena_->nbytes()) return store_.catalog_.release(place.unit);
  op.offset = start;
  op.nbytes = static_cast<uint32_t>(wanted);
  rows_.push_back({index, place, std::move(op), skip, is_alone});
}

// What reads the first row, and as many behind it as `n` says.
IoOp DiskStore::Reading::join_rows(size_t* n) const {
  IoOp op = rows_.front().op;
  for (*n = 1; *n < rows_.size() && op.nbytes < job_nbytes_; ++*n) {
    const Row& row = rows_[*n];
    const uint64_t end = op.offset + op.nbytes;
    const bool is_beside = op.fd >= 0 && row.op.fd == op.fd && row.op.offset >= op.offset &&
                           row.op.offset <= end && !row.is_alone;
    if (!is_beside) break;
    op.nbytes = static_cast<uint32_t>(std::max(end, row.op.offset + row.op.nbytes) - op.offset);
  }
  return op;
}

// Null: there is nothing left to be read, or no buffer.
std::shared_ptr<DiskStore::ReadJob> DiskStore::Reading::prepare(bool may_wait) {
  if (rows_.empty() && !is_over()) look_up();
  auto job = std::make_shared<ReadJob>(&store_.catalog_);
  for (uint64_t nbytes = 0; !rows_.empty() && nbytes < job_nbytes_;) {
    size_t n = 0;
    IoOp op = join_rows(&n);
    Arena::Buffer buffer = may_wait && job->ops.empty() ? store_.read_arena_->take(op.nbytes, deadline_)
                                                        : store_.read_arena_->try_take(op.nbytes);
    if (!buffer) break;
    op.buffer = buffer.data();
    nbytes += op.nbytes;
    for (; n > 0; --n, rows_.pop_front()) {
      const Row& row = rows_.front();
      job->pages.push_back({row.index, row.place, job->ops.size(), row.op.offset + row.skip - op.offset});
    }
    job->ops.push_back(std::move(op));
    job->buffers.push_back(std::move(buffer));
  }
  return job->ops.empty() ? nullptr : job;
}

void DiskStore::Reading::land(const ReadJob& job) {
  std::vector<size_t> n_pages(job.ops.size());
  for (const ReadJob::Page& page : job.pages) ++n_pages[page.op];
  for (size_t i = 0; i < job.ops.size(); ++i) {
    const int64_t result = job.ops[i].result;
    if (result < 0) store_.note_failed_read(static_cast<int>(-result));
    if (result >= 0) store_.n_failed_reads_ = 0;
  }
  for (const ReadJob::Page& page : job.pages) {
    const int64_t result = job.ops[page.op].result;
    if (deadline_.passed()) {
      statuses_[page.index] = ReadStatus::kTimedOut;
    } else if (result >= 0) {
      settle(page, copy_out(job, page));
    } else if (n_pages[page.op] > 1) {
      alone_.push_back(page.index);
    } else if (result == -EIO || result == -ENOENT) {
      // a file that is gone and a sector that can't be read stay so; anything else may pass
      store_.drop_bad(batch_.keys[page.index], page.place);
    }
  }
  if (store_.is_direct_) return;
  for (const IoOp& op : job.ops) {
    if (op.fd >= 0) posix_fadvise(op.fd, static_cast<off_t>(op.offset), op.nbytes, POSIX_FADV_DONTNEED);
  }
}

void DiskStore::Reading::settle(const ReadJob::Page& page, Landing landing) {
  if (landing == Landing::kRight) {
    statuses_[page.index] = ReadStatus::kHit;
    store_.counters_.hit_bytes += page.place.length;
  } else if (landing == Landing::kBad) {
    ++store_.counters_.bad_records;
    store_.drop_bad(batch_.keys[page.index], page.place);
  }
}

// Nor will the next run find it: whoever takes the key back then would not know of it. `forget` would not
// write that down, for the index does not have the key any more.
void DiskStore::drop_bad(const Key& key, const Place& place) {
  if (!catalog_.drop(key, place)) return;
  recalls_.recall(&key, 1);
  recalls_.keep(key);
  wake_writer();
}

// The page in the record, as it is or packed, if that is this key's in every respect but for the bytes, which
// have the checksum if they are right; without bytes otherwise.
DiskStore::Reading::Payload DiskStore::Reading::page_of(const ReadJob& job, const ReadJob::Page& page) {
  const Key& key = batch_.keys[page.index];
  const auto n_read = static_cast<uint64_t>(job.ops[page.op].result);
  if (n_read < page.skip + sizeof(RecordHeader)) return {};
  const uint8_t* from = job.buffers[page.op].data() + page.skip;
  RecordHeader header;
  std::memcpy(&header, from, sizeof header);
  if (store_.options_.verify) {
    if (!is_signed(header, kRecordMagic) || !is_understood(header) || !(header.key == key)) return {};
    if (header.stamp != store_.folder_->stamp() || header.length != page.place.length) return {};
    if (header.checksum != page.place.checksum) return {};
  }
  const uint64_t payload = payload_nbytes(page.place.length, header.stored);
  if (n_read - page.skip - sizeof header < payload) return {};
  from += sizeof header;
  if (header.flags == kPacked) return {from, {page.place.length, header.checksum, payload}};
  if (header.stored != 0) {
    if (!decoder_) decoder_ = std::make_unique<PageDecoder>();
    from = decoder_->decode(from, payload, header.flags, page.place.length);
  }
  return {from, {page.place.length, header.checksum, 0}};
}

// Brings the page to its destination, and says whether it is right there.
DiskStore::Reading::Landing DiskStore::Reading::copy_out(const ReadJob& job, const ReadJob::Page& page) {
  const size_t index = page.index;
  const Payload payload = page_of(job, page);
  if (payload.bytes == nullptr) return Landing::kBad;
  if (batch_.place) return copy_to_place(payload, index);
  const Piece* const pieces = batch_.pieces + index * batch_.n_pieces;
  Checksum sum;
  if (payload.page.packed != 0) {
    if (!codec::unpack(payload.bytes, payload.page.packed, {pieces, batch_.n_pieces}, &sum))
      return Landing::kBad;
  } else {
    const uint8_t* from = payload.bytes;
    for (size_t k = 0; k < batch_.n_pieces; ++k) {
      const auto nbytes = static_cast<size_t>(pieces[k].nbytes);
      copy_and_checksum(reinterpret_cast<void*>(pieces[k].address), from, nbytes, sum);
      from += nbytes;
    }
  }
  return !store_.options_.verify || sum.finish() == payload.page.checksum ? Landing::kRight : Landing::kBad;
}

// As it is kept, and summed before anybody makes room for it.
DiskStore::Reading::Landing DiskStore::Reading::copy_to_place(const Payload& payload, size_t index) {
  const auto& [length, checksum, packed] = payload.page;
  uint64_t sum = checksum;
  if (store_.options_.verify && packed == 0) sum = p2pkv::checksum(payload.bytes, length);
  if (packed != 0 && !codec::checksum_packed(payload.bytes, packed, length, &sum)) return Landing::kBad;
  if (store_.options_.verify && sum != checksum) return Landing::kBad;
  uint8_t* const to = batch_.place(index, payload.page);
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
