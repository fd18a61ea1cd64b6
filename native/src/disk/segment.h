// Segment files: reading what is in them, sealed or not, and sealing them.
#pragma once

#include <functional>
#include <vector>

#include "disk/files.h"
#include "disk/record.h"

namespace p2pkv::disk {

// Bytes of the index and the footer behind it.
constexpr uint64_t index_nbytes(uint64_t n_entries) {
  return round_up(n_entries * sizeof(IndexEntry) + sizeof(SegmentFooter), kBlock);
}

// The entries of a sealed segment; false if it is not sealed, or its index is damaged.
bool load_index(Files& files, int fd, uint64_t file_nbytes, const Stamp& stamp,
                std::vector<IndexEntry>* entries);

// The entries of all records of a segment whose headers and pages are whole, wherever they are; what is torn
// is passed over. `end` is where the last of them ends. 0 or -errno; `is_stopping` ends it early.
int scan_records(Files& files, int fd, uint64_t file_nbytes, const Stamp& stamp,
                 const std::function<bool()>& is_stopping, std::vector<IndexEntry>* entries, uint64_t* end);

// Writes index and footer at `offset`, a multiple of kBlock, and cuts the file there; its new length, or
// -errno.
int64_t write_index(Files& files, int fd, uint64_t id, const Stamp& stamp, uint64_t offset,
                    const std::vector<IndexEntry>& entries);

}  // namespace p2pkv::disk
