#include "disk/record.h"

#include <bit>

#include "base/checksum.h"

namespace p2pkv::disk {

static_assert(std::endian::native == std::endian::little, "the structs are the format; swap bytes here");

template <typename T>
void sign(T* value) {
  value->check = p2pkv::checksum(value, offsetof(T, check));
}

template <typename T>
bool is_signed(const T& value, uint32_t magic) {
  return value.magic == magic && value.version == kFormatVersion &&
         value.check == p2pkv::checksum(&value, offsetof(T, check));
}

template void sign(RecordHeader*);
template void sign(SegmentHeader*);
template void sign(SegmentFooter*);
template void sign(MetaSlot*);
template bool is_signed(const RecordHeader&, uint32_t);
template bool is_signed(const SegmentHeader&, uint32_t);
template bool is_signed(const SegmentFooter&, uint32_t);
template bool is_signed(const MetaSlot&, uint32_t);

RecordHeader header_of(const Key& key, uint32_t length, uint64_t checksum, const Stamp& stamp) {
  RecordHeader header{};
  header.magic = kRecordMagic;
  header.version = kFormatVersion;
  header.key = key;
  header.stamp = stamp;
  header.checksum = checksum;
  header.length = length;
  sign(&header);
  return header;
}

}  // namespace p2pkv::disk
