#include "codec/packed.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "codec/block_kernels.h"

namespace p2pkv::codec {
namespace {

static_assert(std::endian::native == std::endian::little, "the structs are the format; swap bytes here");

constexpr uint32_t kMagic = 0x636b3270;  // "p2kc"
constexpr uint16_t kVersion = 1;
// Blocks by which a page's layout is told: one of eight, and not more of a long page. A guess.
constexpr uint64_t kSamples = 8;
constexpr uint64_t kSampledPart = 8;
// What it must save of these. Unpacking takes longer than a copy, and a class of the pool is a 32nd. A guess.
constexpr uint64_t kLeastSaved = 16;

struct Header {
  uint32_t magic;
  uint16_t version;
  uint16_t reserved;
  uint64_t length;  // of the page
};
static_assert(sizeof(Header) == 16);

struct Block {
  Layout layout;
  uint8_t base;
  uint16_t n_escapes;
};
static_assert(sizeof(Block) == 4);

constexpr size_t kEscapeBytes = sizeof(uint16_t) + sizeof(uint8_t);

const BlockKernel& kernel() {
  return block_kernels().back();
}

constexpr uint64_t n_blocks_of(uint64_t length) {
  return length / kBlockBytes + (length % kBlockBytes != 0);
}

uint64_t payload_of(const Block& block, size_t nbytes) {
  if (block.layout == Layout::kRaw) return nbytes;
  return packed_block_bytes(block.layout) + block.n_escapes * kEscapeBytes;
}

// How a whole block is best kept, if its values have this layout.
Block plan(const uint8_t* bytes, Layout layout) {
  if (layout == Layout::kRaw) return {Layout::kRaw, 0, 0};
  const Window window = kernel().measure[static_cast<size_t>(layout)](bytes);
  const Block block{layout, window.base, static_cast<uint16_t>(window.n_escapes)};
  return payload_of(block, kBlockBytes) < kBlockBytes ? block : Block{Layout::kRaw, 0, 0};
}

// Walks over the pieces of a page, from a place in it.
class Walk {
 public:
  Walk(const Bytes& page, uint64_t skip) : page_(page) {
    while (at_ < page_.n_pieces && skip >= left()) {
      skip -= left();
      ++at_;
    }
    offset_ = skip;
  }

  // The next bytes, where they lie if they lie together; else null, and `gather` or `scatter` takes them.
  uint8_t* together(size_t nbytes) {
    while (at_ < page_.n_pieces && left() == 0) next_piece();
    if (at_ == page_.n_pieces || left() < nbytes) return nullptr;
    uint8_t* const bytes = here();
    offset_ += nbytes;
    return bytes;
  }
  void gather(uint8_t* to, size_t nbytes) {
    each(nbytes, [&](uint8_t* bytes, size_t n) {
      std::memcpy(to, bytes, n);
      to += n;
    });
  }
  void scatter(const uint8_t* from, size_t nbytes) {
    each(nbytes, [&](uint8_t* bytes, size_t n) {
      std::memcpy(bytes, from, n);
      from += n;
    });
  }

 private:
  uint64_t left() const { return static_cast<uint64_t>(page_.pieces[at_].nbytes) - offset_; }
  uint8_t* here() const { return reinterpret_cast<uint8_t*>(page_.pieces[at_].address) + offset_; }
  void next_piece() {
    ++at_;
    offset_ = 0;
  }
  template <typename Take>
  void each(size_t nbytes, const Take& take) {
    while (nbytes > 0 && at_ < page_.n_pieces) {
      const auto n = static_cast<size_t>(std::min<uint64_t>(left(), nbytes));
      take(here(), n);
      nbytes -= n;
      offset_ += n;
      if (left() == 0) next_piece();
    }
  }

  Bytes page_;
  size_t at_ = 0;
  uint64_t offset_ = 0;
};

// The page's next block, in `room` if it doesn't lie together.
const uint8_t* next_block(Walk& walk, size_t nbytes, uint8_t* room) {
  if (const uint8_t* bytes = walk.together(nbytes)) return bytes;
  walk.gather(room, nbytes);
  return room;
}

// The layout that makes a few blocks of the page the smallest; raw if that is not worth it.
Layout layout_of(const Bytes& page, uint64_t length) {
  const uint64_t n_whole = length / kBlockBytes;
  const uint64_t step = std::max(kSampledPart, n_whole / kSamples);
  uint64_t nbytes[kLayouts] = {};
  alignas(64) uint8_t room[kBlockBytes];
  for (uint64_t i = step / 2 % std::max<uint64_t>(1, n_whole); i < n_whole; i += step) {
    Walk walk(page, i * kBlockBytes);
    const uint8_t* const bytes = next_block(walk, kBlockBytes, room);
    for (size_t k = 0; k < kLayouts; ++k)
      nbytes[k] += payload_of(plan(bytes, static_cast<Layout>(k)), kBlockBytes);
  }
  const uint64_t* const least = std::min_element(nbytes, nbytes + kLayouts);
  const bool is_worth_it = nbytes[0] - *least >= nbytes[0] / kLeastSaved;
  return is_worth_it ? static_cast<Layout>(least - nbytes) : Layout::kRaw;
}

// Writes a block's payload, and returns where it ends.
uint8_t* pack_block(const uint8_t* bytes, const Block& block, uint8_t* to) {
  const auto layout = static_cast<size_t>(block.layout);
  alignas(64) uint8_t is_escape[kBlockValues];
  kernel().pack[layout](bytes, block.base, to, is_escape);
  to += packed_block_bytes(block.layout);
  if (block.n_escapes == 0) return to;
  const unsigned shift = block.layout == Layout::kBf16 ? 7 : 10;
  const unsigned most = block.layout == Layout::kBf16 ? 0xff : 0x1f;
  uint8_t* const exponents = to + block.n_escapes * sizeof(uint16_t);
  size_t n = 0;
  for (size_t group = 0; group < kBlockValues; group += sizeof(uint64_t)) {
    uint64_t flags;
    std::memcpy(&flags, is_escape + group, sizeof flags);
    for (; flags != 0 && n < block.n_escapes; flags &= flags - 1, ++n) {
      const auto position = static_cast<uint16_t>(group + static_cast<size_t>(std::countr_zero(flags)) / 8);
      uint16_t value;
      std::memcpy(&value, bytes + position * sizeof value, sizeof value);
      std::memcpy(to + n * sizeof position, &position, sizeof position);
      exponents[n] = static_cast<uint8_t>(value >> shift & most);
    }
  }
  return exponents + block.n_escapes;
}

// False if an escape lies outside of the block.
bool unpack_block(const uint8_t* from, const Block& block, uint8_t* bytes) {
  kernel().unpack[static_cast<size_t>(block.layout)](from, block.base, bytes);
  const unsigned shift = block.layout == Layout::kBf16 ? 7 : 10;
  const unsigned most = block.layout == Layout::kBf16 ? 0xff : 0x1f;
  const uint8_t* const positions = from + packed_block_bytes(block.layout);
  const uint8_t* const exponents = positions + block.n_escapes * sizeof(uint16_t);
  for (size_t i = 0; i < block.n_escapes; ++i) {
    uint16_t position;
    std::memcpy(&position, positions + i * sizeof position, sizeof position);
    if (position >= kBlockValues) return false;
    uint16_t value;
    std::memcpy(&value, bytes + position * sizeof value, sizeof value);
    const unsigned rest = value & ~(most << shift);
    value = static_cast<uint16_t>(rest | (exponents[i] & most) << shift);
    std::memcpy(bytes + position * sizeof value, &value, sizeof value);
  }
  return true;
}

// Where packed bytes come from: memory of their own, or the pieces that they are unpacked into.
class Source {
 public:
  explicit Source(const uint8_t* from) : from_(from) {}
  Source(const Bytes& page, uint64_t skip) : walk_(page, skip), from_(nullptr) {}

  // The next bytes, which stay as they are until the next call; `room` has room for them. From the pieces
  // they are always copied: what is unpacked into these may overlap them.
  const uint8_t* take(uint8_t* room, size_t nbytes) {
    if (from_ == nullptr) {
      walk_.gather(room, nbytes);
      return room;
    }
    const uint8_t* const bytes = from_;
    from_ += nbytes;
    return bytes;
  }
  void skip(uint64_t nbytes, const Bytes& page, uint64_t at) {
    if (from_ == nullptr) {
      walk_ = Walk(page, at);
    } else {
      from_ += nbytes;
    }
  }

 private:
  Walk walk_{Bytes{nullptr, 0}, 0};
  const uint8_t* from_;
};

// The table of the page of `length` bytes that is packed in `nbytes`, and where its blocks begin. Null if
// there is none. Valid until this thread's next call.
const Block* read_table(Source& source, uint64_t nbytes, uint64_t length, uint64_t* start) {
  if (nbytes < sizeof(Header) || nbytes % kUnit != 0) return nullptr;
  Header header;
  uint8_t bytes_of_header[sizeof header];
  std::memcpy(&header, source.take(bytes_of_header, sizeof header), sizeof header);
  if (header.magic != kMagic || header.version != kVersion || header.length != length) return nullptr;
  const uint64_t n_blocks = n_blocks_of(length);
  const uint64_t ahead = nbytes - sizeof header;
  if (n_blocks > ahead / sizeof(Block)) return nullptr;
  thread_local std::vector<Block> table;
  table.resize(n_blocks);
  auto* const room = reinterpret_cast<uint8_t*>(table.data());
  const uint8_t* const bytes = source.take(room, n_blocks * sizeof(Block));
  if (bytes != room) std::memcpy(room, bytes, n_blocks * sizeof(Block));
  uint64_t payload = 0;
  for (uint64_t i = 0; i < n_blocks; ++i) {
    const bool is_whole = (i + 1) * kBlockBytes <= length;
    if (static_cast<size_t>(table[i].layout) >= kLayouts) return nullptr;
    if (table[i].layout != Layout::kRaw && !is_whole) return nullptr;
    const uint64_t n = is_whole ? kBlockBytes : length % kBlockBytes;
    if (payload_of(table[i], n) > n) return nullptr;
    payload += payload_of(table[i], n);
  }
  const uint64_t table_end = sizeof header + n_blocks * sizeof(Block);
  if (payload > nbytes - table_end || nbytes - table_end - payload >= kUnit) return nullptr;
  *start = nbytes - payload;
  return table.data();
}

// `page` without pieces: its bytes are only summed.
bool unpack_from(Source source, uint64_t nbytes, const Bytes& page, uint64_t length, uint64_t in_place,
                 Checksum* sum) {
  uint64_t start = 0;
  const Block* const table = read_table(source, nbytes, length, &start);
  if (table == nullptr) return false;
  source.skip(start - sizeof(Header) - n_blocks_of(length) * sizeof(Block), page, in_place + start);
  Walk to(page, 0);
  alignas(64) uint8_t packed[kBlockBytes];
  alignas(64) uint8_t apart[kBlockBytes];
  for (uint64_t i = 0; i * kBlockBytes < length; ++i) {
    const auto n = static_cast<size_t>(std::min<uint64_t>(kBlockBytes, length - i * kBlockBytes));
    const Block block = table[i];
    const uint8_t* const from = source.take(packed, payload_of(block, n));
    uint8_t* const together = to.together(n);
    uint8_t* const bytes = together != nullptr ? together : apart;
    if (block.layout == Layout::kRaw) {
      std::memcpy(bytes, from, n);
    } else if (!unpack_block(from, block, bytes)) {
      return false;
    }
    if (sum != nullptr) sum->update(bytes, n);
    if (together == nullptr) to.scatter(apart, n);
  }
  return true;
}

}  // namespace

uint64_t Bytes::nbytes() const {
  uint64_t nbytes = 0;
  for (size_t i = 0; i < n_pieces; ++i) nbytes += static_cast<uint64_t>(pieces[i].nbytes);
  return nbytes;
}

Size measure(const Bytes& page) {
  const uint64_t length = page.nbytes();
  const Layout layout = layout_of(page, length);
  if (layout == Layout::kRaw) return {};
  uint64_t payload = length % kBlockBytes;
  Walk walk(page, 0);
  alignas(64) uint8_t room[kBlockBytes];
  for (uint64_t i = 0; i < length / kBlockBytes; ++i)
    payload += payload_of(plan(next_block(walk, kBlockBytes, room), layout), kBlockBytes);
  const uint64_t nbytes = sizeof(Header) + n_blocks_of(length) * sizeof(Block) + payload;
  const uint64_t rounded = (nbytes + kUnit - 1) / kUnit * kUnit;
  return rounded < length ? Size{rounded, payload, static_cast<uint8_t>(layout)} : Size{};
}

bool pack(const Bytes& page, const Size& size, uint8_t* to, Checksum* sum) {
  const uint64_t length = page.nbytes();
  const auto layout = static_cast<Layout>(size.layout);
  const Header header{kMagic, kVersion, 0, length};
  uint8_t* entry = to + sizeof header;
  uint8_t* at = to + size.nbytes - size.payload;
  uint8_t* const table_end = entry + n_blocks_of(length) * sizeof(Block);
  if (table_end > at) return false;
  std::memcpy(to, &header, sizeof header);
  std::memset(table_end, 0, static_cast<size_t>(at - table_end));
  Walk walk(page, 0);
  alignas(64) uint8_t room[kBlockBytes];
  for (uint64_t i = 0; i * kBlockBytes < length; ++i, entry += sizeof(Block)) {
    const auto n = static_cast<size_t>(std::min<uint64_t>(kBlockBytes, length - i * kBlockBytes));
    const uint8_t* const bytes = next_block(walk, n, room);
    const Block block = plan(bytes, n == kBlockBytes ? layout : Layout::kRaw);
    if (payload_of(block, n) > static_cast<uint64_t>(to + size.nbytes - at)) return false;
    sum->update(bytes, n);
    if (block.layout == Layout::kRaw) {
      std::memcpy(at, bytes, n);
      at += n;
    } else {
      at = pack_block(bytes, block, at);
    }
    std::memcpy(entry, &block, sizeof block);
  }
  return at == to + size.nbytes;
}

bool unpack(const uint8_t* from, uint64_t nbytes, const Bytes& page, Checksum* sum) {
  return unpack_from(Source(from), nbytes, page, page.nbytes(), 0, sum);
}

bool unpack_in_place(const Bytes& page, uint64_t nbytes) {
  const uint64_t length = page.nbytes();
  if (nbytes >= length) return false;
  const uint64_t at = length - nbytes;
  return unpack_from(Source(page, at), nbytes, page, length, at, nullptr);
}

bool checksum_packed(const uint8_t* from, uint64_t nbytes, uint64_t length, uint64_t* checksum) {
  Checksum sum;
  if (!unpack_from(Source(from), nbytes, Bytes{nullptr, 0}, length, 0, &sum)) return false;
  *checksum = sum.finish();
  return true;
}

std::string_view kernel_name() {
  return kernel().name;
}

}  // namespace p2pkv::codec
