// One preallocated file of pages, and sixteen files of slots that say where in it they lie.
#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "disk/layout.h"

namespace p2pkv::disk {
namespace {

constexpr size_t kSlotFiles = 16;
// Of a file of slots, read at once when recovering.
constexpr uint64_t kSlotWindow = 1 << 20;
constexpr size_t kSlotBatch = 4096;
// How often a block of slots is read before it is given up: for 15 times `retry_seconds`, as the pauses
// double. The number is a guess.
constexpr unsigned kMostLooks = 5;
// Data for each slot of metadata: no page is smaller on disk.
constexpr uint64_t kDataPerSlot = kBlock;

// Bytes of a record in `data`.
uint64_t extent_of(const Chunk::Record& record) {
  return round_up(record_nbytes(payload_nbytes(record.length, record.stored)), kBlock);
}
uint64_t extent_of(const MetaSlot& slot) {
  return slot.n_blocks != 0 ? slot.n_blocks * kBlock : round_up(record_nbytes(slot.length), kBlock);
}

struct Found {
  MetaSlot slot;
  uint64_t where;
};

class OffsetLayout : public Layout {
 public:
  explicit OffsetLayout(Backing backing)
      : Layout(std::move(backing)),
        data_path_(disk_.path + "/data"),
        folder_(disk_.path + "/meta"),
        extents_(0) {
    const uint64_t room = disk_.options.capacity > kOverhead ? disk_.options.capacity - kOverhead : 0;
    // the files of slots take whole blocks, and so does the data
    const uint64_t n_slots = room / (kDataPerSlot + sizeof(MetaSlot));
    slots_per_file_ = n_slots / kSlotFiles / (kBlock / sizeof(MetaSlot)) * (kBlock / sizeof(MetaSlot));
    data_nbytes_ = (room - kSlotFiles * slots_per_file_ * sizeof(MetaSlot)) / kBlock * kBlock;
  }

  std::string open() override;
  int recover() override;
  bool recovers_first() const override { return true; }
  uint64_t alignment() const override { return kBlock; }
  uint64_t largest_page() const override { return data_nbytes_ / 4 - sizeof(RecordHeader); }
  int begin(const std::shared_ptr<Chunk>& chunk) override;
  int finish(Chunk& chunk) override;
  int sync() override;
  uint64_t next_order() const override { return next_sequence_; }
  void abandon() override;
  void reset() override {
    data_ = UniqueFd();
    for (SlotFile& file : slot_files_) file = SlotFile();
    extents_ = Extents(0);
    n_looks_ = 0;
  }
  void locate(const Key& key, const Place& place, IoOp* op) const override {
    op->fd = data_.get();
    op->offset = place.unit->offset;
  }

 private:
  struct SlotFile {
    UniqueFd fd;
    std::vector<uint32_t> free;  // slots
  };

  void remove(const Unit& unit) override;
  static size_t file_of(const Key& key) { return key.bytes[15] % kSlotFiles; }
  static uint64_t slot_id(size_t file, uint64_t slot) { return uint64_t{file} << 32 | slot; }
  int64_t write_slot(uint64_t id, const MetaSlot& slot) {
    return disk_.files.write(slot_files_[id >> 32].fd.get(), &slot, sizeof slot,
                             (id & 0xffffffff) * sizeof(MetaSlot));
  }
  int64_t read_slots(int fd, MetaSlot* window, uint64_t offset);
  int64_t read_block(int fd, uint8_t* block, uint64_t offset);
  int load_slots(size_t file, std::vector<Found>* found);
  CatalogEntry add_unit(const Chunk::Record& record, uint64_t offset, uint64_t slot);
  int place(const Chunk::Record& record, uint64_t nbytes, CatalogEntry* entry);
  void give_up(Chunk& chunk);

  const std::string data_path_;
  const std::string folder_;
  uint64_t slots_per_file_;
  uint64_t data_nbytes_;
  UniqueFd data_;
  std::array<SlotFile, kSlotFiles> slot_files_;
  Extents extents_;
  uint64_t next_sequence_ = 1;
  unsigned n_looks_ = 0;  // calls of `recover`
};

std::string OffsetLayout::open() {
  if (slots_per_file_ == 0)
    return "a capacity of " + std::to_string(disk_.options.capacity) +
           " bytes is too small for layout 'offset'";
  if (const int made = disk_.files.make_folder(folder_); made < 0)
    return "cannot make " + folder_ + ": " + std::strerror(-made);
  data_ = UniqueFd(open_data(data_path_, O_RDWR | O_CREAT));
  int64_t done = data_.get();
  // an earlier capacity may have been larger
  if (done >= 0) done = disk_.files.nbytes(data_path_, false);
  if (done > static_cast<int64_t>(data_nbytes_)) done = disk_.files.truncate(data_.get(), data_nbytes_);
  if (done >= 0) done = disk_.files.allocate(data_.get(), data_nbytes_);
  if (done < 0) return "cannot reserve " + data_path_ + ": " + std::strerror(static_cast<int>(-done));
  for (size_t i = 0; i < kSlotFiles; ++i) {
    const std::string path = folder_ + "/" + "0123456789abcdef"[i];
    slot_files_[i].fd = UniqueFd(disk_.files.open(path, O_RDWR | O_CREAT));
    int64_t sized = slot_files_[i].fd.get();
    const uint64_t nbytes = slots_per_file_ * sizeof(MetaSlot);
    if (sized >= 0) sized = disk_.files.nbytes(path, false);
    if (sized > static_cast<int64_t>(nbytes)) sized = disk_.files.truncate(slot_files_[i].fd.get(), nbytes);
    if (sized >= 0) sized = disk_.files.allocate(slot_files_[i].fd.get(), nbytes);
    if (sized < 0) return "cannot reserve " + path + ": " + std::strerror(static_cast<int>(-sized));
  }
  extents_ = Extents(data_nbytes_);
  next_sequence_ = std::max(next_sequence_, disk_.recalls.highest());
  return "";
}

// Zeros for all slots at once; this takes no room, so that a full disk can do it.
void OffsetLayout::abandon() {
  if (disk_.is_lost) return;
  for (const SlotFile& file : slot_files_) {
    if (disk_.files.truncate(file.fd.get(), 0) < 0 ||
        disk_.files.allocate(file.fd.get(), slots_per_file_ * sizeof(MetaSlot)) < 0)
      ++disk_.counters.write_errors;
  }
}

// A block of the slots. One that can't be read for long would keep the store from taking any page for as
// long: its pages are given up instead. It is written over, so that no later start finds them, nor what was
// taken back of them.
int64_t OffsetLayout::read_block(int fd, uint8_t* block, uint64_t offset) {
  const int64_t n = disk_.files.read(fd, block, kBlock, offset);
  // ENODATA is what Linux says of a sector that the medium has lost
  if (n >= 0 || (n != -EIO && n != -ENODATA) || n_looks_ < kMostLooks || disk_.is_lost) return n;
  std::memset(block, 0, kBlock);
  int64_t done = disk_.files.write(fd, block, kBlock, offset);
  if (done >= 0) done = std::min(done, int64_t{disk_.files.sync(fd)});
  if (done < 0) return done;
  ++disk_.counters.bad_records;
  return kBlock;
}

// A window of slots: as a whole, or where that fails block by block.
int64_t OffsetLayout::read_slots(int fd, MetaSlot* window, uint64_t offset) {
  const uint64_t nbytes = std::min(kSlotWindow, slots_per_file_ * sizeof(MetaSlot) - offset);
  int64_t n = disk_.files.read(fd, window, nbytes, offset);
  if (n >= 0) return n;
  auto* const bytes = reinterpret_cast<uint8_t*>(window);
  for (uint64_t at = 0; at < nbytes; at += kBlock) {
    n = read_block(fd, bytes + at, offset + at);
    if (n < static_cast<int64_t>(kBlock)) return n < 0 ? n : static_cast<int64_t>(at) + n;
  }
  return static_cast<int64_t>(nbytes);
}

int OffsetLayout::load_slots(size_t file, std::vector<Found>* found) {
  std::vector<MetaSlot> window(kSlotWindow / sizeof(MetaSlot));
  slot_files_[file].free.clear();
  for (uint64_t first = 0; first < slots_per_file_ && !disk_.is_stopping; first += window.size()) {
    const int64_t n = read_slots(slot_files_[file].fd.get(), window.data(), first * sizeof(MetaSlot));
    if (n < 0) return static_cast<int>(n);  // the slots that are there would lead to bytes of others
    const uint64_t n_slots =
        std::min<uint64_t>(static_cast<uint64_t>(n) / sizeof(MetaSlot), slots_per_file_ - first);
    for (uint64_t i = 0; i < n_slots; ++i) {
      const MetaSlot& slot = window[i];
      const bool is_ours = slot.magic == kSlotMagic && is_signed(slot, kSlotMagic) &&
                           slot.store == static_cast<uint32_t>(disk_.stamp.store);
      if (is_ours && slot.offset % kBlock == 0 && slot.offset + extent_of(slot) <= data_nbytes_) {
        found->push_back({slot, slot_id(file, first + i)});
      } else {
        slot_files_[file].free.push_back(static_cast<uint32_t>(first + i));
      }
    }
  }
  return 0;
}

int OffsetLayout::recover() {
  ++n_looks_;
  std::vector<Found> found;
  for (size_t file = 0; file < kSlotFiles; ++file) {
    if (const int loaded = load_slots(file, &found); loaded < 0) return loaded;
  }
  // the youngest first: where two claim the same bytes the older one's are gone
  std::sort(found.begin(), found.end(),
            [](const Found& a, const Found& b) { return a.slot.sequence > b.slot.sequence; });
  const auto is_lost = [this](const Found& one) {
    if (extents_.take(one.slot.offset, extent_of(one.slot))) return false;
    write_slot(one.where, MetaSlot{});
    slot_files_[one.where >> 32].free.push_back(static_cast<uint32_t>(one.where));
    ++disk_.counters.removed_orphans;
    return true;
  };
  found.erase(std::remove_if(found.begin(), found.end(), is_lost), found.end());
  std::vector<CatalogEntry> batch;
  for (size_t i = found.size(); i-- > 0 && !disk_.is_stopping;) {
    const MetaSlot& slot = found[i].slot;
    next_sequence_ = std::max(next_sequence_, slot.sequence + 1);
    // the record says how many bytes of its blocks it takes
    const auto stored =
        static_cast<uint32_t>(slot.n_blocks != 0 ? extent_of(slot) - sizeof(RecordHeader) : 0);
    const Chunk::Record record{slot.key, slot.checksum, slot.length, stored, 0};
    batch.push_back(add_unit(record, slot.offset, found[i].where));
    batch.back().place.unit->order = slot.sequence;
    if (batch.size() < kSlotBatch && i > 0) continue;
    disk_.counters.recovered_pages += disk_.catalog.add(batch.data(), batch.size(), Source::kRecovered);
    for (const CatalogEntry& entry : batch) disk_.catalog.admit(entry.place.unit);
    batch.clear();
  }
  return 0;
}

CatalogEntry OffsetLayout::add_unit(const Chunk::Record& record, uint64_t offset, uint64_t slot) {
  auto unit = std::make_unique<Unit>();
  unit->id = slot;
  unit->key = record.key;
  unit->offset = offset;
  unit->slot = slot;
  unit->nbytes = extent_of(record) + sizeof(MetaSlot);
  unit->is_open = true;
  Unit* const added = disk_.catalog.add_unit(std::move(unit));
  return {record.key, {added, 0, record.checksum, record.length, record.stored}, record.since};
}

void OffsetLayout::remove(const Unit& unit) {
  // before the bytes are used again: a slot that leads to another page's bytes would only be found when read
  if (write_slot(unit.slot, MetaSlot{}) < 0) ++disk_.counters.write_errors;
  slot_files_[unit.slot >> 32].free.push_back(static_cast<uint32_t>(unit.slot));
  const uint64_t nbytes = unit.nbytes - sizeof(MetaSlot);
  // not after a restore: the file it lay in is gone
  if (unit.offset + nbytes <= data_nbytes_) extents_.free(unit.offset, nbytes);
}

int OffsetLayout::place(const Chunk::Record& record, uint64_t nbytes, CatalogEntry* entry) {
  SlotFile& file = slot_files_[file_of(record.key)];
  while (file.free.empty()) {
    if (const int evicted = evict_one(); evicted < 0) return evicted;
  }
  uint64_t offset;
  while ((offset = extents_.allocate(nbytes)) == Extents::kNone) {
    if (const int evicted = evict_one(); evicted < 0) return evicted;
  }
  const uint64_t slot = slot_id(file_of(record.key), file.free.back());
  file.free.pop_back();
  *entry = add_unit(record, offset, slot);
  return 0;
}

int OffsetLayout::begin(const std::shared_ptr<Chunk>& chunk) {
  for (const Chunk::Record& record : chunk->records) {
    const uint64_t nbytes = extent_of(record);
    CatalogEntry entry;
    if (const int placed = place(record, nbytes, &entry); placed < 0) {
      give_up(*chunk);
      return placed;
    }
    chunk->entries.push_back(entry);
    IoOp op;
    op.is_write = true;
    op.fd = data_.get();
    op.offset = entry.place.unit->offset;
    op.buffer = chunk->buffer.data() + record.at;
    op.nbytes = static_cast<uint32_t>(nbytes);
    chunk->ops.push_back(op);
  }
  disk_.io.submit(chunk);
  return 0;
}

void OffsetLayout::give_up(Chunk& chunk) {
  for (const CatalogEntry& entry : chunk.entries) disk_.catalog.retire(entry.place.unit);
  delete_due(Deadline::after(0));
}

int OffsetLayout::finish(Chunk& chunk) {
  int64_t done = 0;
  for (const IoOp& op : chunk.ops) done = std::min(done, op.result);
  // a slot on the device must not lead to bytes that are not
  if (done >= 0 && must_sync(FsyncPolicy::kBatch)) done = disk_.files.sync(data_.get());
  for (size_t i = 0; i < chunk.entries.size() && done >= 0; ++i) {
    const CatalogEntry& entry = chunk.entries[i];
    MetaSlot slot{};
    slot.magic = kSlotMagic;
    slot.version = kFormatVersion;
    if (entry.place.stored != 0)
      slot.n_blocks = static_cast<uint16_t>(round_up(record_nbytes(entry.place.stored), kBlock) / kBlock);
    slot.key = entry.key;
    slot.offset = entry.place.unit->offset;
    slot.checksum = entry.place.checksum;
    slot.sequence = entry.place.unit->order = next_sequence_++;
    slot.length = entry.place.length;
    slot.store = static_cast<uint32_t>(disk_.stamp.store);
    sign(&slot);
    done = write_slot(entry.place.unit->slot, slot);
  }
  if (done >= 0 && must_sync(FsyncPolicy::kBatch)) done = sync();
  if (done < 0) {
    give_up(chunk);
    return static_cast<int>(done);
  }
  for (const CatalogEntry& entry : chunk.entries) {
    disk_.catalog.add(&entry, 1, Source::kWritten);
    disk_.catalog.admit(entry.place.unit);
  }
  return 0;
}

int OffsetLayout::sync() {
  int done = disk_.files.sync(data_.get());
  for (const SlotFile& file : slot_files_) done = std::min(done, disk_.files.sync(file.fd.get()));
  return done;
}

}  // namespace

std::unique_ptr<Layout> offset_layout(Backing backing) {
  return std::make_unique<OffsetLayout>(std::move(backing));
}

}  // namespace p2pkv::disk
