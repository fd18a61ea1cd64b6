// What lies on disk, byte by byte: docs/disk.md has the tables. Everything is little-endian.
#pragma once

#include <cstdint>
#include <type_traits>

#include "page/location.h"

namespace p2pkv::disk {

constexpr uint16_t kFormatVersion = 1;
constexpr uint32_t kRecordMagic = 0x726b3270;   // "p2kr"
constexpr uint32_t kSegmentMagic = 0x736b3270;  // "p2ks"
constexpr uint32_t kFooterMagic = 0x666b3270;   // "p2kf"
constexpr uint32_t kSlotMagic = 0x6d6b3270;     // "p2km"

// Records start at multiples of this.
constexpr uint64_t kRecordAlign = 64;

// What ties bytes to one store: a record of any other is a bad one.
struct Stamp {
  uint64_t name_space;  // checksum of the namespace's text
  uint64_t store;       // random, made with the store
  friend bool operator==(const Stamp&, const Stamp&) = default;
};

enum RecordFlag : uint16_t {
  kCompressed = 1,  // with zstd
  kSplit = 2,       // before that: even bytes first, then the odd ones
  kPacked = 4,      // as it lay in the pool, in its packed form (codec/packed.h); never with the others
};
constexpr uint16_t kKnownFlags = kCompressed | kSplit | kPacked;

// In front of each page, wherever it lies.
struct RecordHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t flags;  // RecordFlag; others are for later
  Key key;
  Stamp stamp;
  uint64_t checksum;  // of the page
  uint32_t length;    // of the page
  uint32_t stored;    // bytes behind the header; 0: the page as it is
  uint64_t check;     // of the bytes above
};
static_assert(sizeof(RecordHeader) == kRecordAlign && std::is_trivially_copyable_v<RecordHeader>);

// The first block of a segment begins with it; the first record follows in the second block.
struct SegmentHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t reserved;
  uint64_t id;
  Stamp stamp;
  uint64_t check;
};
static_assert(sizeof(SegmentHeader) == 40);

// Where one record of a sealed segment lies.
struct IndexEntry {
  Key key;
  uint64_t offset;
  uint64_t checksum;
  uint32_t length;
  uint32_t stored;  // as in the record's header
};
static_assert(sizeof(IndexEntry) == 40);

// The last bytes of the last block of a sealed segment.
struct SegmentFooter {
  uint32_t magic;
  uint16_t version;
  uint16_t reserved;
  uint64_t id;
  Stamp stamp;
  uint64_t index_offset;
  uint64_t n_entries;
  uint64_t index_check;  // checksum of the entries
  uint64_t check;
};
static_assert(sizeof(SegmentFooter) == 64);

// One page of the offset layout: a slot of one of the files in `meta`. All zeros: free.
struct MetaSlot {
  uint32_t magic;
  uint16_t version;
  uint16_t n_blocks;  // of a record that is compressed; 0: the page as it is
  Key key;
  uint64_t offset;
  uint64_t checksum;
  uint64_t sequence;  // a slot with a larger one is younger
  uint32_t length;
  uint32_t store;  // low half of the stamp's
  uint64_t check;
};
static_assert(sizeof(MetaSlot) == 64);

// Fills in `check`.
template <typename T>
void sign(T* value);
// Whether magic, version and check are right.
template <typename T>
bool is_signed(const T& value, uint32_t magic);

RecordHeader header_of(const Key& key, uint32_t length, uint64_t checksum, const Stamp& stamp);

// Bytes behind a record's header, without padding.
constexpr uint32_t payload_nbytes(uint32_t length, uint32_t stored) {
  return stored != 0 ? stored : length;
}
// Whether flags and lengths are those that some version writes.
inline bool is_understood(const RecordHeader& header) {
  if ((header.flags & kPacked) != 0 && header.flags != kPacked) return false;
  const bool is_shorter = (header.flags & (kCompressed | kPacked)) != 0;
  return (header.flags & ~kKnownFlags) == 0 && is_shorter == (header.stored != 0);
}

// Bytes of a record on disk before padding to blocks.
constexpr uint64_t record_nbytes(uint64_t length) {
  return (sizeof(RecordHeader) + length + kRecordAlign - 1) / kRecordAlign * kRecordAlign;
}

}  // namespace p2pkv::disk
