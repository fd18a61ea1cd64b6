#include "disk/segment.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/checksum.h"
#include "codec/packed.h"
#include "disk/compression.h"
#include "disk/layout.h"

namespace p2pkv::disk {
namespace {

// Read at once when a segment is scanned. A guess.
constexpr uint64_t kWindow = 4 << 20;

uint64_t checksum_of(const std::vector<IndexEntry>& entries) {
  return checksum(entries.data(), entries.size() * sizeof(IndexEntry));
}

// Whether the bytes behind a record's header are those of its page.
bool is_whole(const RecordHeader& header, const uint8_t* payload, PageDecoder* decoder) {
  const uint8_t* page = payload;
  if (header.flags == kPacked) {
    uint64_t sum = 0;
    return codec::checksum_packed(payload, header.stored, header.length, &sum) && sum == header.checksum;
  }
  if (header.stored != 0) page = decoder->decode(payload, header.stored, header.flags, header.length);
  return page != nullptr && checksum(page, header.length) == header.checksum;
}

// A window that slides over a file.
class Window {
 public:
  Window(Files& files, int fd, uint64_t file_nbytes)
      : files_(files), fd_(fd), file_nbytes_(file_nbytes), bytes_(kWindow) {}

  // `nbytes` bytes at `offset`; null past the end of the file or on an error.
  const uint8_t* at(uint64_t offset, uint64_t nbytes) {
    if (offset + nbytes > file_nbytes_) return nullptr;
    if (offset < start_ || offset + nbytes > start_ + n_loaded_) load(offset, nbytes);
    return offset + nbytes > start_ + n_loaded_ ? nullptr : bytes_.data() + (offset - start_);
  }
  int error() const { return error_; }

 private:
  void load(uint64_t offset, uint64_t nbytes) {
    start_ = offset / kBlock * kBlock;
    const uint64_t wanted = std::max(kWindow, round_up(offset + nbytes - start_, kBlock));
    if (wanted > bytes_.nbytes()) bytes_ = AlignedBytes(wanted);
    const int64_t n = files_.read(fd_, bytes_.data(), wanted, start_);
    n_loaded_ = n < 0 ? 0 : static_cast<uint64_t>(n);
    if (n < 0) error_ = static_cast<int>(n);
  }

  Files& files_;
  const int fd_;
  const uint64_t file_nbytes_;
  AlignedBytes bytes_;
  uint64_t start_ = 0;
  uint64_t n_loaded_ = 0;
  int error_ = 0;
};

}  // namespace

bool load_index(Files& files, int fd, uint64_t file_nbytes, const Stamp& stamp,
                std::vector<IndexEntry>* entries) {
  if (file_nbytes < 2 * kBlock || file_nbytes % kBlock != 0) return false;
  const AlignedBytes last(kBlock);
  if (files.read(fd, last.data(), kBlock, file_nbytes - kBlock) != static_cast<int64_t>(kBlock)) return false;
  SegmentFooter footer;
  std::memcpy(&footer, last.data() + kBlock - sizeof footer, sizeof footer);
  if (!is_signed(footer, kFooterMagic) || footer.stamp != stamp) return false;
  if (footer.n_entries > file_nbytes / sizeof(IndexEntry)) return false;
  if (footer.index_offset + index_nbytes(footer.n_entries) != file_nbytes) return false;
  const AlignedBytes index(index_nbytes(footer.n_entries));
  const auto wanted = static_cast<int64_t>(index.nbytes());
  if (files.read(fd, index.data(), index.nbytes(), footer.index_offset) != wanted) return false;
  entries->resize(footer.n_entries);
  if (footer.n_entries > 0) std::memcpy(entries->data(), index.data(), footer.n_entries * sizeof(IndexEntry));
  return checksum_of(*entries) == footer.index_check;
}

int scan_records(Files& files, int fd, uint64_t file_nbytes, const Stamp& stamp,
                 const std::function<bool()>& is_stopping, std::vector<IndexEntry>* entries, uint64_t* end) {
  Window window(files, fd, file_nbytes);
  PageDecoder decoder;
  uint64_t offset = kBlock;
  *end = kBlock;
  while (!is_stopping()) {
    const uint8_t* at = window.at(offset, sizeof(RecordHeader));
    if (at == nullptr) break;
    RecordHeader header;
    std::memcpy(&header, at, sizeof header);
    const bool is_record = header.magic == kRecordMagic && is_signed(header, kRecordMagic) &&
                           header.stamp == stamp && is_understood(header);
    const uint64_t payload = payload_nbytes(header.length, header.stored);
    const uint64_t nbytes = record_nbytes(payload);
    const uint8_t* record = is_record ? window.at(offset, sizeof header + payload) : nullptr;
    if (record != nullptr && is_whole(header, record + sizeof header, &decoder)) {
      entries->push_back({header.key, offset, header.checksum, header.length, header.stored});
      *end = offset + nbytes;
      offset += nbytes;
    } else {
      // A torn record says nothing about those behind it: chunks reach the disk in any order.
      offset += kRecordAlign;
    }
  }
  return window.error();
}

int64_t write_index(Files& files, int fd, uint64_t id, const Stamp& stamp, uint64_t offset,
                    const std::vector<IndexEntry>& entries) {
  const AlignedBytes bytes(index_nbytes(entries.size()));
  if (!entries.empty()) std::memcpy(bytes.data(), entries.data(), entries.size() * sizeof(IndexEntry));
  SegmentFooter footer{};
  footer.magic = kFooterMagic;
  footer.version = kFormatVersion;
  footer.id = id;
  footer.stamp = stamp;
  footer.index_offset = offset;
  footer.n_entries = entries.size();
  footer.index_check = checksum_of(entries);
  sign(&footer);
  std::memcpy(bytes.data() + bytes.nbytes() - sizeof footer, &footer, sizeof footer);
  const int64_t written = files.write(fd, bytes.data(), bytes.nbytes(), offset);
  if (written < 0) return written;
  const uint64_t file_nbytes = offset + bytes.nbytes();
  const int cut = files.truncate(fd, file_nbytes);
  return cut < 0 ? cut : static_cast<int64_t>(file_nbytes);
}

}  // namespace p2pkv::disk
