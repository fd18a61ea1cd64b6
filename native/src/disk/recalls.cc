#include "disk/recalls.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/checksum.h"

namespace p2pkv::disk {
namespace {

using Lock = std::lock_guard<std::mutex>;

constexpr uint32_t kRecallsMagic = 0x746b3270;  // "p2kt"
constexpr uint64_t kEntryNbytes = 32;
// A file that is longer was made by no version, and is not read.
constexpr int64_t kMaxFile = 64 << 20;
// So many recalls are kept in memory of pages that have no record on disk, for those that are on their way
// there. The number is a guess.
constexpr size_t kMaxInMemory = 1 << 16;

}  // namespace

Recalls::Entry Recalls::entry_of(const Key& key, uint64_t before) {
  Entry entry{key, before, 0};
  entry.check = checksum(&entry, offsetof(Entry, check));
  return entry;
}

int Recalls::open(Files& files, const std::string& path, const Stamp& stamp, uint64_t max_nbytes,
                  bool* is_damaged) {
  files_ = &files;
  path_ = path;
  stamp_ = stamp;
  max_entries_ = max_nbytes / kEntryNbytes - 1;
  *is_damaged = false;
  const int64_t nbytes = files.nbytes(path, false);
  if (nbytes == -ENOENT) return replace();
  if (nbytes < 0) return static_cast<int>(nbytes);
  std::string content;
  if (nbytes <= kMaxFile) {
    const int loaded = load_file(files, path, static_cast<size_t>(nbytes), &content);
    if (loaded < 0) return loaded;
  }
  if (!parse(content)) {
    *is_damaged = true;
    recall_all();
    return replace();
  }
  fd_ = UniqueFd(files.open(path, O_RDWR));
  return std::min(fd_.get(), 0);
}

bool Recalls::parse(const std::string& content) {
  Header header;
  if (content.size() < sizeof header || content.size() % kEntryNbytes != 0) return false;
  std::memcpy(&header, content.data(), sizeof header);
  if (header.magic != kRecallsMagic || header.version != kFormatVersion || header.stamp != stamp_ ||
      header.check != checksum(&header, offsetof(Header, check)))
    return false;
  const Entry none{};
  bool is_over = false;
  for (size_t at = sizeof header; at < content.size(); at += sizeof(Entry)) {
    Entry entry;
    std::memcpy(&entry, content.data() + at, sizeof entry);
    if (std::memcmp(&entry, &none, sizeof entry) == 0) {
      is_over = true;
      continue;
    }
    if (is_over || entry.check != checksum(&entry, offsetof(Entry, check))) return false;
    ++n_entries_;
    if (entry.key == Key{}) {
      all_ = {0, entry.before};
      keys_.clear();
    } else {
      keys_.insert_or_assign(entry.key, Recall{0, entry.before});
    }
    has_open_ends_ = has_open_ends_ || entry.before == kEverything;
  }
  return true;
}

uint64_t Recalls::now() const {
  const Lock lock(mutex_);
  return now_;
}

bool Recalls::is_recalled(const Key& key, uint64_t since) const {
  const Lock lock(mutex_);
  if (since < all_.number || since < floor_) return true;
  const auto found = keys_.find(key);
  return found != keys_.end() && since < found->second.number;
}

bool Recalls::is_void(const Key& key, uint64_t order) const {
  const Lock lock(mutex_);
  if (order < all_.before) return true;
  const auto found = keys_.find(key);
  return found != keys_.end() && order < found->second.before;
}

uint64_t Recalls::highest() const {
  const Lock lock(mutex_);
  uint64_t highest = all_.before == kEverything ? 0 : all_.before;
  for (const auto& [key, recall] : keys_) {
    if (recall.before != kEverything) highest = std::max(highest, recall.before);
  }
  return highest;
}

void Recalls::recall(const Key* keys, size_t n) {
  const Lock lock(mutex_);
  ++now_;
  if (keys_.size() + n > std::max<size_t>(kMaxInMemory, 2 * max_entries_)) make_room();
  for (size_t i = 0; i < n; ++i) keys_[keys[i]].number = now_;
}

// With the lock. What is kept for the disk stays.
void Recalls::make_room() {
  floor_ = now_;
  std::erase_if(keys_, [](const auto& one) { return one.second.before == 0; });
}

void Recalls::keep(const Key& key) {
  const Lock lock(mutex_);
  ++n_kept_;
  const auto found = keys_.try_emplace(key, Recall{now_}).first;
  found->second.before = kEverything;
  pending_.push_back(key);
}

void Recalls::recall_all() {
  const Lock lock(mutex_);
  ++n_kept_;
  all_ = {++now_, kEverything};
  is_all_pending_ = true;
  pending_.clear();
  keys_.clear();  // older than this
}

uint64_t Recalls::cleared() const {
  const Lock lock(mutex_);
  return all_.number;
}

uint64_t Recalls::n_kept() const {
  const Lock lock(mutex_);
  return n_kept_;
}

bool Recalls::is_pending() const {
  const Lock lock(mutex_);
  return is_all_pending_ || !pending_.empty();
}

// With the lock. The entries for what is pending, in the order in which they count.
std::vector<Recalls::Entry> Recalls::take_pending(uint64_t order) {
  std::vector<Entry> entries;
  if (is_all_pending_) {
    all_.before = order;
    entries.push_back(entry_of(Key{}, order));
  }
  for (const Key& key : pending_) {
    const auto found = keys_.find(key);
    if (found == keys_.end()) continue;
    found->second.before = order;
    entries.push_back(entry_of(key, order));
  }
  is_all_pending_ = false;
  pending_.clear();
  return entries;
}

int Recalls::write(uint64_t order, uint64_t oldest) {
  std::vector<Entry> entries;
  std::vector<Key> keys;
  bool is_all;
  bool must_replace;
  {
    const Lock lock(mutex_);
    is_all = is_all_pending_;
    keys = pending_;
    entries = take_pending(order);
    // nothing has been placed yet above an order that was not known until now
    must_replace =
        (has_open_ends_ && order != kEverything) || n_entries_ + entries.size() > max_entries_ || !fd_;
    if (entries.empty() && !must_replace) return 0;
    if (must_replace && !prune(order, oldest)) return -ENOBUFS;
  }
  const int done = must_replace ? replace() : append(entries);
  const Lock lock(mutex_);
  if (done < 0) {
    is_all_pending_ = is_all_pending_ || is_all;
    pending_.insert(pending_.begin(), keys.begin(), keys.end());
    return done;
  }
  has_open_ends_ = has_open_ends_ || (!must_replace && order == kEverything);
  return 0;
}

// With the lock. Forgets what no record is left of; false if the file would still be half full.
bool Recalls::prune(uint64_t order, uint64_t oldest) {
  size_t n_left = 0;
  all_.before = std::min(all_.before, order);
  if (all_.before <= oldest) all_.before = 0;
  for (auto& [key, recall] : keys_) {
    recall.before = std::min(recall.before, order);
    if (recall.before <= oldest) recall.before = 0;
    n_left += recall.before != 0;
  }
  return n_left < max_entries_ / 2;
}

int Recalls::append(const std::vector<Entry>& entries) {
  const uint64_t nbytes = entries.size() * sizeof(Entry);
  const int64_t done =
      files_->write(fd_.get(), entries.data(), nbytes, sizeof(Header) + n_entries_ * sizeof(Entry));
  if (done < 0) return static_cast<int>(done);
  n_entries_ += entries.size();
  return 0;
}

// Writes what is known now; room for the rest is reserved, so that a disk that fills up doesn't lack it.
int Recalls::replace() {
  Header header{kRecallsMagic, kFormatVersion, 0, stamp_, 0};
  header.check = checksum(&header, offsetof(Header, check));
  std::string content(reinterpret_cast<const char*>(&header), sizeof header);
  const auto add = [&content](const Entry& entry) {
    content.append(reinterpret_cast<const char*>(&entry), sizeof entry);
  };
  {
    const Lock lock(mutex_);
    has_open_ends_ = all_.before == kEverything;
    if (all_.before != 0) add(entry_of(Key{}, all_.before));
    for (const auto& [key, recall] : keys_) {
      if (recall.before != 0) add(entry_of(key, recall.before));
      has_open_ends_ = has_open_ends_ || recall.before == kEverything;
    }
  }
  if (const int replaced = replace_file(*files_, path_, content); replaced < 0) return replaced;
  n_entries_ = content.size() / kEntryNbytes - 1;
  fd_ = UniqueFd(files_->open(path_, O_RDWR));
  if (fd_.get() < 0) return fd_.get();
  return files_->allocate(fd_.get(), (max_entries_ + 1) * kEntryNbytes);
}

int Recalls::restore() {
  return replace();
}

}  // namespace p2pkv::disk
