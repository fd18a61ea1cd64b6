// The default layout: append-only segment files, sealed with an index and evicted whole.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "disk/layout.h"
#include "disk/segment.h"

namespace p2pkv::disk {
namespace {

// Above the length of a segment: what the file system may need to find its blocks.
constexpr uint64_t kSlack = kBlock;
// So many bits of a record's order say where in its segment it lies, in multiples of kRecordAlign: 16 GiB.
constexpr unsigned kPositionBits = 28;

class BucketLayout : public Layout {
 public:
  explicit BucketLayout(Backing backing) : Layout(std::move(backing)), folder_(disk_.path + "/segments") {
    bucket_nbytes_ = disk_.options.bucket_size;
    if (bucket_nbytes_ == 0)
      bucket_nbytes_ = std::clamp<uint64_t>(disk_.options.capacity / 32, 1 << 20, 512 << 20);
    bucket_nbytes_ = round_up(bucket_nbytes_, kBlock);
  }

  std::string open() override;
  int recover() override;
  uint64_t alignment() const override { return kRecordAlign; }
  uint64_t largest_page() const override {
    return bucket_nbytes_ - kBlock - index_nbytes(1) - sizeof(RecordHeader) - kBlock;
  }
  bool must_settle_before(const Chunk& chunk) const override { return open_ != nullptr && !fits(chunk); }
  int begin(const std::shared_ptr<Chunk>& chunk) override;
  int finish(Chunk& chunk) override;
  int prepare() override { return open_ == nullptr ? start_segment() : 0; }
  int sync() override { return open_ == nullptr ? 0 : disk_.files.sync(open_->fd.get()); }
  int seal() override;
  uint64_t next_order() const override {
    return open_ == nullptr ? next_id_ << kPositionBits : open_->order + end_ / kRecordAlign;
  }
  uint64_t oldest_order() const override { return disk_.catalog.oldest_order(next_order()); }
  void abandon() override { reset(); }
  void reset() override {
    open_ = nullptr;
    entries_.clear();
  }
  void locate(const Key& key, const Place& place, IoOp* op) const override {
    op->fd = place.unit->fd.get();
    op->offset = place.offset;
  }

 private:
  void remove(const Unit& unit) override { disk_.files.remove(path_of(unit.id)); }

  std::string path_of(uint64_t id) const {
    char name[32];
    std::snprintf(name, sizeof name, "/%016" PRIx64 ".seg", id);
    return folder_ + name;
  }
  bool fits(const Chunk& chunk) const {
    return end_ + chunk.nbytes + index_nbytes(n_placed_ + chunk.records.size()) <= bucket_nbytes_;
  }
  int start_segment();
  void recover_segment(Unit* unit);

  const std::string folder_;
  uint64_t bucket_nbytes_;
  uint64_t next_id_ = 1;
  std::vector<uint64_t> found_;  // segments of earlier runs, oldest first

  // The segment being written; null between two.
  Unit* open_ = nullptr;
  uint64_t end_ = 0;                 // where the next chunk goes
  uint64_t n_placed_ = 0;            // records of all chunks so far
  std::vector<IndexEntry> entries_;  // of the finished ones
};

std::string BucketLayout::open() {
  if (disk_.options.capacity < 4 * bucket_nbytes_ + disk_.overhead)
    return "a capacity of " + std::to_string(disk_.options.capacity) +
           " bytes holds less than four segments of " + std::to_string(bucket_nbytes_);
  if (const int made = disk_.files.make_folder(folder_); made < 0)
    return "cannot make " + folder_ + ": " + std::strerror(-made);
  std::vector<std::string> names;
  if (const int listed = disk_.files.list(folder_, &names); listed < 0)
    return "cannot list " + folder_ + ": " + std::strerror(-listed);
  std::sort(names.begin(), names.end());
  next_id_ = std::max(next_id_, (disk_.recalls.highest() >> kPositionBits) + 1);
  found_.clear();
  for (const std::string& name : names) {
    uint64_t id = 0;
    const std::string path = folder_ + "/" + name;
    const bool is_ours =
        std::sscanf(name.c_str(), "%16" SCNx64 ".seg", &id) == 1 && id > 0 && path_of(id) == path;
    UniqueFd fd(is_ours ? open_data(path, O_RDWR) : -ELOOP);
    // A start that is short of descriptors, or may not read a file, says nothing about what is in it.
    if (fd.get() < 0 && fd.get() != -ELOOP && fd.get() != -EISDIR)
      return "cannot open " + path + ": " + std::strerror(-fd.get());
    const int64_t nbytes = fd ? disk_.files.nbytes(path, false) : 0;
    const int64_t occupied = fd ? disk_.files.nbytes(path, true) : 0;
    if (nbytes < 0 || occupied < 0)
      return "cannot examine " + path + ": " + std::strerror(static_cast<int>(-std::min(nbytes, occupied)));
    // its last record, if it had as many as can be
    const bool is_void = disk_.recalls.is_void(Key{}, ((id + 1) << kPositionBits) - 1);
    const bool is_segment = fd && nbytes >= static_cast<int64_t>(kBlock);
    if (is_segment) next_id_ = std::max(next_id_, id + 1);
    if (!is_segment || is_void) {
      disk_.files.remove(path);
      ++disk_.counters.removed_orphans;
      continue;
    }
    auto unit = std::make_unique<Unit>();
    unit->id = id;
    unit->order = id << kPositionBits;
    unit->nbytes = static_cast<uint64_t>(std::max(nbytes, occupied)) + kSlack;
    unit->fd = std::move(fd);
    disk_.catalog.add_unit(std::move(unit));
    found_.push_back(id);
  }
  // the capacity may have shrunk since
  return make_room(0) < 0 ? "cannot make room in " + folder_ : "";
}

int BucketLayout::recover() {
  // the youngest first: most likely to be asked for, and the last to be evicted
  for (size_t i = found_.size(); i-- > 0 && !disk_.is_stopping;) {
    Unit* unit = disk_.catalog.hold_unit(found_[i]);
    if (unit == nullptr) continue;
    recover_segment(unit);
    disk_.catalog.release(unit);
  }
  found_.clear();
  return 0;
}

void BucketLayout::recover_segment(Unit* unit) {
  const int64_t nbytes = disk_.files.nbytes(path_of(unit->id), false);
  if (nbytes == -ENOENT) return disk_.catalog.retire(unit);
  if (nbytes < 0) {
    disk_.catalog.note_unread(unit);
    ++disk_.counters.read_errors;
    return;
  }
  std::vector<IndexEntry> entries;
  bool is_read = true;
  if (!load_index(disk_.files, unit->fd.get(), static_cast<uint64_t>(nbytes), disk_.stamp, &entries)) {
    entries.clear();
    uint64_t end = 0;
    const int scanned = scan_records(
        disk_.files, unit->fd.get(), static_cast<uint64_t>(nbytes), disk_.stamp,
        [this] { return disk_.is_stopping.load(); }, &entries, &end);
    if (disk_.is_stopping) return;
    if (scanned < 0) {
      is_read = false;
      disk_.catalog.note_unread(unit);
      ++disk_.counters.read_errors;
    }
    if (scanned == 0 && !entries.empty()) {
      // a failure leaves it to be scanned again at the next start
      const int64_t sealed =
          write_index(disk_.files, unit->fd.get(), unit->id, disk_.stamp, round_up(end, kBlock), entries);
      if (sealed > 0) disk_.catalog.resize(unit, static_cast<uint64_t>(sealed) + kSlack);
      if (sealed < 0) ++disk_.counters.write_errors;
    }
  }
  std::vector<CatalogEntry> pages;
  pages.reserve(entries.size());
  for (const IndexEntry& entry : entries)
    pages.push_back({entry.key, {unit, entry.offset, entry.checksum, entry.length, entry.stored}});
  const size_t n = disk_.catalog.add(pages.data(), pages.size(), Source::kRecovered);
  disk_.counters.recovered_pages += n;
  // A segment that could not be read stays: the next start may be able to read it.
  if (n == 0 && is_read) {
    disk_.catalog.retire(unit);
    ++disk_.counters.removed_orphans;
  }
}

int BucketLayout::start_segment() {
  if (const int made = make_room(bucket_nbytes_ + kSlack); made < 0) return made;
  const uint64_t id = next_id_++;
  const std::string path = path_of(id);
  UniqueFd fd(open_data(path, O_RDWR | O_CREAT | O_EXCL));
  if (fd.get() < 0) return fd.get();
  AlignedBytes block(kBlock);
  SegmentHeader header{};
  header.magic = kSegmentMagic;
  header.version = kFormatVersion;
  header.id = id;
  header.stamp = disk_.stamp;
  sign(&header);
  std::memcpy(block.data(), &header, sizeof header);
  int64_t done = disk_.files.allocate(fd.get(), bucket_nbytes_);
  if (done >= 0) done = disk_.files.write(fd.get(), block.data(), kBlock, 0);
  if (done < 0) {
    disk_.files.remove(path);
    return static_cast<int>(done);
  }
  auto unit = std::make_unique<Unit>();
  unit->id = id;
  unit->order = id << kPositionBits;
  unit->nbytes = bucket_nbytes_ + kSlack;
  unit->fd = std::move(fd);
  unit->is_open = true;
  open_ = disk_.catalog.add_unit(std::move(unit));
  end_ = kBlock;
  n_placed_ = 0;
  entries_.clear();
  return 0;
}

int BucketLayout::begin(const std::shared_ptr<Chunk>& chunk) {
  if (open_ != nullptr && !fits(*chunk)) {
    if (const int sealed = seal(); sealed < 0) return sealed;
  }
  if (open_ == nullptr) {
    if (const int started = start_segment(); started < 0) return started;
  }
  for (const Chunk::Record& record : chunk->records)
    chunk->entries.push_back(
        {record.key, {open_, end_ + record.at, record.checksum, record.length, record.stored}, record.since});
  IoOp op;
  op.is_write = true;
  op.fd = open_->fd.get();
  op.offset = end_;
  op.buffer = chunk->buffer.data();
  op.nbytes = static_cast<uint32_t>(chunk->nbytes);
  chunk->ops.push_back(op);
  end_ += chunk->nbytes;
  n_placed_ += chunk->records.size();
  disk_.io.submit(chunk);
  return 0;
}

int BucketLayout::finish(Chunk& chunk) {
  const IoOp& op = chunk.ops[0];
  if (op.result < 0) return static_cast<int>(op.result);
  if (must_sync(FsyncPolicy::kBatch)) {
    if (const int synced = disk_.files.sync(op.fd); synced < 0) return synced;
  }
  if (!disk_.is_direct) {
    // what was written is in the pool too: out of the page cache with it
    sync_file_range(op.fd, static_cast<off_t>(op.offset), op.nbytes,
                    SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    posix_fadvise(op.fd, static_cast<off_t>(op.offset), op.nbytes, POSIX_FADV_DONTNEED);
  }
  for (const CatalogEntry& entry : chunk.entries) {
    const Place& place = entry.place;
    entries_.push_back({entry.key, place.offset, place.checksum, place.length, place.stored});
  }
  disk_.catalog.add(chunk.entries.data(), chunk.entries.size(), Source::kWritten);
  return 0;
}

int BucketLayout::seal() {
  if (open_ == nullptr) return 0;
  Unit* unit = std::exchange(open_, nullptr);
  if (entries_.empty()) {
    disk_.catalog.retire(unit);
    delete_due(Deadline::after(0));
    return 0;
  }
  const int64_t nbytes = write_index(disk_.files, unit->fd.get(), unit->id, disk_.stamp, end_, entries_);
  if (nbytes > 0) disk_.catalog.resize(unit, static_cast<uint64_t>(nbytes) + kSlack);
  // Sealed or not it takes no more; without an index the next start scans its records.
  disk_.catalog.admit(unit);
  if (nbytes < 0) return static_cast<int>(nbytes);
  return must_sync(FsyncPolicy::kSeal) ? disk_.files.sync(unit->fd.get()) : 0;
}

}  // namespace

std::unique_ptr<Layout> bucket_layout(Backing backing) {
  return std::make_unique<BucketLayout>(std::move(backing));
}

}  // namespace p2pkv::disk
