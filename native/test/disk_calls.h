// A disk store of small pages in a folder of its own, and what is written to it and read.
#pragma once

#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "check.h"
#include "disk/store.h"
#include "keys.h"

namespace p2pkv::test {

inline constexpr size_t kBatch = 16;
inline constexpr disk::LayoutKind kLayouts[] = {disk::LayoutKind::kBucket, disk::LayoutKind::kFile,
                                                disk::LayoutKind::kOffset};

class TemporaryFolder {
 public:
  TemporaryFolder() {
    char pattern[] = "/tmp/p2pkv-disk-XXXXXX";
    path_ = mkdtemp(pattern);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Every 8 bytes of a page are its name; the size depends on the name alone.
inline size_t nbytes_of(uint64_t name) {
  return (1 + name % 5) * 1000;
}

struct Batch {
  std::vector<Key> keys = std::vector<Key>(kBatch);
  std::vector<Piece> pages = std::vector<Piece>(kBatch);
  std::vector<uint64_t> names = std::vector<uint64_t>(kBatch);
  std::vector<uint64_t> checksums = std::vector<uint64_t>(kBatch);
  std::vector<uint64_t> tickets = std::vector<uint64_t>(kBatch);
  std::vector<std::vector<uint64_t>> memory{kBatch, std::vector<uint64_t>(5000 / 8)};

  explicit Batch(uint64_t first) {
    for (size_t i = 0; i < kBatch; ++i) {
      names[i] = first + i;
      keys[i] = key_of(names[i]);
      std::fill(memory[i].begin(), memory[i].end(), names[i]);
      pages[i] = {reinterpret_cast<int64_t>(memory[i].data()), static_cast<int64_t>(nbytes_of(names[i]))};
      checksums[i] = checksum(memory[i].data(), nbytes_of(names[i]));
    }
  }
  // Each ticket is the address of a counter.
  void write(disk::DiskStore& store, std::atomic<uint64_t>* n_released, uint64_t* n_accepted) {
    std::fill(tickets.begin(), tickets.end(), reinterpret_cast<uint64_t>(n_released));
    uint8_t accepted[kBatch];
    std::vector<uint64_t> lengths;
    for (const Piece& page : pages) lengths.push_back(static_cast<uint64_t>(page.nbytes));
    store.write(
        {kBatch, keys.data(), pages.data(), lengths.data(), checksums.data(), tickets.data(), store.now()},
        accepted);
    for (const uint8_t one : accepted) *n_accepted += one;
  }
  // The number of hits; checks their bytes.
  size_t read(disk::DiskStore& store, double timeout) {
    for (auto& page : memory) std::fill(page.begin(), page.end(), ~uint64_t{0});
    disk::ReadStatus statuses[kBatch];
    store.read({kBatch, 1, keys.data(), pages.data()}, Deadline::after(timeout), statuses);
    size_t n_hits = 0;
    for (size_t i = 0; i < kBatch; ++i) {
      if (statuses[i] != disk::ReadStatus::kHit) continue;
      ++n_hits;
      for (size_t k = 0; k < nbytes_of(names[i]) / 8; ++k) CHECK(memory[i][k] == names[i]);
    }
    return n_hits;
  }
};

inline constexpr uint64_t kSmall = 8 << 20;
inline constexpr uint64_t kRoomForAll = 64 << 20;  // that are filled in, also in layout offset

inline disk::DiskOptions small_options(disk::LayoutKind layout, uint64_t capacity = kSmall) {
  disk::DiskOptions options;
  options.capacity = capacity;
  options.layout = layout;
  options.bucket_size = 1 << 20;
  options.retry_seconds = 0.01;
  options.read_buffer = 4 << 20;
  options.release = [](const uint64_t* tickets, size_t n) {
    for (size_t i = 0; i < n; ++i) ++*reinterpret_cast<std::atomic<uint64_t>*>(tickets[i]);
  };
  return options;
}

inline disk::DiskStore::Owner open(const std::string& path, const disk::DiskOptions& options) {
  std::string error;
  auto store = disk::DiskStore::open(path, {"n1", "ns"}, options, &error);
  if (!store) std::cerr << error << "\n";
  CHECK(store != nullptr);
  return store;
}

}  // namespace p2pkv::test
