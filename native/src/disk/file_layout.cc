// A file a page, in a two-level tree: the name says everything that the index needs.
#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <utility>

#include "disk/layout.h"

namespace p2pkv::disk {
namespace {

constexpr const char* kHexDigits = "0123456789abcdef";
// What a name costs in its folder; ext4 takes 8 bytes and the name's length, and fills blocks by half at
// least.
constexpr uint64_t kNameNbytes = 192;
// Of the recovered pages that become visible together.
constexpr size_t kNameBatch = 4096;

std::string hex_of(const Key& key) {
  std::string text;
  for (const uint8_t byte : key.bytes) {
    text += kHexDigits[byte >> 4];
    text += kHexDigits[byte & 15];
  }
  return text;
}

// What a file's name says.
struct PageName {
  uint64_t sequence;  // grows; the age of the page
  Key key;
  uint64_t checksum;
  uint32_t length;
  uint32_t stored;  // of the record, see RecordHeader
};

class FileLayout : public Layout {
 public:
  explicit FileLayout(Backing backing) : Layout(std::move(backing)), folder_(disk_.path + "/pages") {}

  std::string open() override;
  int recover() override;
  bool recovers_first() const override { return true; }
  uint64_t alignment() const override { return kBlock; }
  uint64_t largest_page() const override {
    const uint64_t nbytes = (disk_.options.capacity - kOverhead) / 4;
    return nbytes > sizeof(RecordHeader) ? nbytes - sizeof(RecordHeader) : 0;
  }
  // Everything is done in `finish`: opening and renaming have no place in a batch of I/O.
  int begin(const std::shared_ptr<Chunk>& chunk) override { return 0; }
  int finish(Chunk& chunk) override;
  int sync() override { return 0; }  // each file was, when the policy wants it
  uint64_t next_order() const override { return next_sequence_; }
  void reset() override { is_seen_.fill(false); }
  void locate(const Key& key, const Place& place, IoOp* op) const override {
    op->path = path_of({place.unit->id, key, place.checksum, place.length, place.stored});
    op->offset = 0;
  }

 private:
  void remove(const Unit& unit) override {
    disk_.files.remove(path_of({unit.id, unit.key, unit.offset, static_cast<uint32_t>(unit.slot),
                                static_cast<uint32_t>(unit.slot >> 32)}));
  }

  std::string folder_of(const Key& key) const {
    return folder_ + "/" + kHexDigits[key.bytes[0] >> 4] + "/" + kHexDigits[key.bytes[0] & 15];
  }
  std::string path_of(const PageName& name) const {
    char numbers[64];
    if (name.stored == 0) {
      std::snprintf(numbers, sizeof numbers, "-%016" PRIx64 "-%08" PRIx32 ".page", name.checksum,
                    name.length);
    } else {
      std::snprintf(numbers, sizeof numbers, "-%016" PRIx64 "-%08" PRIx32 "-%08" PRIx32 ".page",
                    name.checksum, name.length, name.stored);
    }
    char sequence[24];
    std::snprintf(sequence, sizeof sequence, "/%016" PRIx64 "-", name.sequence);
    return folder_of(name.key) + sequence + hex_of(name.key) + numbers;
  }
  bool parse(const std::string& folder, const std::string& file, PageName* name) const;
  int list_folder(const std::string& folder, std::vector<PageName>* names);
  int store(const Chunk& chunk, const Chunk::Record& record);
  CatalogEntry add_unit(const PageName& name);

  const std::string folder_;
  uint64_t next_sequence_ = 1;
  bool has_folders_ = false;
  std::array<bool, 256> is_seen_{};  // folders of which the pages were found
};

std::string FileLayout::open() {
  if (disk_.options.capacity < 4 * kOverhead)
    return "a capacity of " + std::to_string(disk_.options.capacity) + " bytes is too small; at least " +
           std::to_string(4 * kOverhead) + " are needed";
  std::vector<std::string> folders{folder_};
  for (const char* first = kHexDigits; *first != 0; ++first) {
    folders.push_back(folder_ + "/" + *first);
    for (const char* second = kHexDigits; *second != 0; ++second)
      folders.push_back(folder_ + "/" + *first + "/" + *second);
  }
  for (const std::string& folder : folders) {
    if (const int made = disk_.files.make_folder(folder); made < 0)
      return "cannot make " + folder + ": " + std::strerror(-made);
  }
  next_sequence_ = std::max(next_sequence_, disk_.recalls.highest());
  if (std::exchange(has_folders_, true)) return "";
  // each is a block; a unit that is never evicted holds them in the count
  auto unit = std::make_unique<Unit>();
  unit->nbytes = folders.size() * kBlock;
  unit->is_open = unit->is_fixed = true;
  disk_.catalog.add_unit(std::move(unit));
  return "";
}

bool FileLayout::parse(const std::string& folder, const std::string& file, PageName* name) const {
  char key[33];
  if (std::sscanf(file.c_str(), "%16" SCNx64 "-%32[0-9a-f]-%16" SCNx64 "-%8" SCNx32 "-%8" SCNx32,
                  &name->sequence, key, &name->checksum, &name->length, &name->stored) < 4)
    return false;
  for (size_t i = 0; i < sizeof(Key); ++i) {
    unsigned byte = 0;
    if (std::sscanf(key + 2 * i, "%2x", &byte) != 1) return false;
    name->key.bytes[i] = static_cast<uint8_t>(byte);
  }
  return path_of(*name) == folder + "/" + file;
}

int FileLayout::list_folder(const std::string& folder, std::vector<PageName>* names) {
  std::vector<std::string> files;
  if (const int listed = disk_.files.list(folder, &files); listed < 0) return listed;
  for (const std::string& file : files) {
    PageName name{};
    if (parse(folder, file, &name)) {
      names->push_back(name);
    } else if (!disk_.is_lost) {  // a draft, or nobody's
      disk_.files.remove(folder + "/" + file);
      ++disk_.counters.removed_orphans;
    }
  }
  return 0;
}

int FileLayout::recover() {
  std::vector<PageName> names;
  // What is not seen would take room that nobody counts. The others' pages can be read meanwhile.
  int failure = 0;
  for (unsigned i = 0; i < is_seen_.size() && !disk_.is_stopping; ++i) {
    if (is_seen_[i]) continue;
    const int listed = list_folder(folder_ + "/" + kHexDigits[i >> 4] + "/" + kHexDigits[i & 15], &names);
    if (listed < 0) failure = listed;
    is_seen_[i] = listed >= 0;
  }
  std::sort(names.begin(), names.end(),
            [](const PageName& a, const PageName& b) { return a.sequence < b.sequence; });
  std::vector<CatalogEntry> batch;
  for (size_t i = 0; i < names.size() && !disk_.is_stopping; ++i) {
    next_sequence_ = std::max(next_sequence_, names[i].sequence + 1);
    batch.push_back(add_unit(names[i]));
    if (batch.size() < kNameBatch && i + 1 < names.size()) continue;
    disk_.counters.recovered_pages += disk_.catalog.add(batch.data(), batch.size(), Source::kRecovered);
    for (const CatalogEntry& entry : batch) disk_.catalog.admit(entry.place.unit);
    batch.clear();
  }
  return failure;
}

CatalogEntry FileLayout::add_unit(const PageName& name) {
  auto unit = std::make_unique<Unit>();
  unit->id = name.sequence;
  unit->order = name.sequence;
  unit->key = name.key;
  unit->offset = name.checksum;
  unit->slot = uint64_t{name.stored} << 32 | name.length;
  unit->nbytes =
      round_up(sizeof(RecordHeader) + payload_nbytes(name.length, name.stored), kBlock) + kNameNbytes;
  unit->is_open = true;
  return {name.key, {disk_.catalog.add_unit(std::move(unit)), 0, name.checksum, name.length, name.stored}};
}

int FileLayout::finish(Chunk& chunk) {
  for (const Chunk::Record& record : chunk.records) {
    if (const int stored = store(chunk, record); stored < 0) return stored;
  }
  return 0;
}

int FileLayout::store(const Chunk& chunk, const Chunk::Record& record) {
  const uint64_t nbytes = sizeof(RecordHeader) + payload_nbytes(record.length, record.stored);
  if (const int made = make_room(round_up(nbytes, kBlock) + kNameNbytes); made < 0) return made;
  const PageName name{next_sequence_++, record.key, record.checksum, record.length, record.stored};
  const std::string path = path_of(name);
  const std::string draft = path + ".new";
  CatalogEntry entry = add_unit(name);  // counts before it is written
  entry.since = record.since;
  int64_t done;
  {
    const UniqueFd fd(disk_.files.open(draft, O_WRONLY | O_CREAT | O_TRUNC));
    done = fd.get();
    if (done >= 0) done = disk_.files.write(fd.get(), chunk.buffer.data() + record.at, nbytes, 0);
    if (done >= 0 && must_sync(FsyncPolicy::kSeal)) done = disk_.files.sync(fd.get());
    if (done >= 0) {
      // the pool has these bytes too: out of the page cache with them
      sync_file_range(fd.get(), 0, 0, SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
      posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
    }
  }
  if (done >= 0) done = disk_.files.rename(draft, path);
  if (done >= 0 && must_sync(FsyncPolicy::kBatch)) done = sync_folder(disk_.files, folder_of(record.key));
  if (done < 0) {
    disk_.files.remove(draft);
    disk_.catalog.retire(entry.place.unit);
    delete_due(Deadline::after(0));
    return static_cast<int>(done);
  }
  disk_.catalog.add(&entry, 1, Source::kWritten);
  disk_.catalog.admit(entry.place.unit);
  return 0;
}

}  // namespace

std::unique_ptr<Layout> file_layout(Backing backing) {
  return std::make_unique<FileLayout>(std::move(backing));
}

}  // namespace p2pkv::disk
