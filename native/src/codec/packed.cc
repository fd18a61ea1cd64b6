#include "codec/packed.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "base/copy_kernels.h"
#include "codec/block_kernels.h"
#include "codec/cold_memory.h"
#include "codec/page_walk.h"

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

constexpr size_t kEscapeBytes = sizeof(uint16_t) + sizeof(uint8_t);

const BlockKernel& kernel() {
  return block_kernels().back();
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

// Writes a block's payload. False if it has not as many escapes as planned: its values have changed.
bool pack_block(const uint8_t* bytes, const Block& block, uint8_t* to) {
  constexpr size_t kGroup = sizeof(uint64_t);
  const auto layout = static_cast<size_t>(block.layout);
  alignas(64) uint8_t is_escape[kBlockValues];
  kernel().pack[layout](bytes, block.base, to, is_escape);
  const unsigned shift = block.layout == Layout::kBf16 ? 7 : 10;
  const unsigned most = block.layout == Layout::kBf16 ? 0xff : 0x1f;
  uint8_t* const positions = to + packed_block_bytes(block.layout);
  uint8_t* const exponents = positions + block.n_escapes * sizeof(uint16_t);
  size_t n = 0;
  for (size_t eighth = 0; eighth < kBlockValues; eighth += 8 * kGroup) {
    uint64_t flags[8];
    std::memcpy(flags, is_escape + eighth, sizeof flags);
    if ((flags[0] | flags[1] | flags[2] | flags[3] | flags[4] | flags[5] | flags[6] | flags[7]) == 0)
      continue;
    for (size_t k = 0; k < 8; ++k) {
      for (; flags[k] != 0; flags[k] &= flags[k] - 1, ++n) {
        if (n == block.n_escapes) return false;
        const auto bit = static_cast<size_t>(std::countr_zero(flags[k]));
        const auto position = static_cast<uint16_t>(eighth + k * kGroup + bit / 8);
        uint16_t value;
        std::memcpy(&value, bytes + position * sizeof value, sizeof value);
        std::memcpy(positions + n * sizeof position, &position, sizeof position);
        exponents[n] = static_cast<uint8_t>(value >> shift & most);
      }
    }
  }
  return n == block.n_escapes;
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

// Where packed bytes come from.
class Source {
 public:
  enum class Kind {
    kStill,    // memory of their own, which nobody writes to
    kShared,   // others may write to it meanwhile
    kInPlace,  // the pieces that they are unpacked into
  };
  Source(Kind kind, const uint8_t* from) : kind_(kind), from_(from) {}
  Source(const Bytes& page, uint64_t skip) : kind_(Kind::kInPlace), walk_(page, skip) {}

  // The next bytes, which stay as they are until the next call; `room` has room for them. What others may
  // write to is loaded once, and only the copy is looked at: so what was found good there is what is used.
  const uint8_t* take(uint8_t* room, size_t nbytes) {
    if (kind_ == Kind::kInPlace) {
      walk_.gather(room, nbytes);
      return room;
    }
    const uint8_t* const bytes = from_;
    from_ += nbytes;
    if (kind_ == Kind::kStill) return bytes;
    library_kernel().copy(room, bytes, nbytes);
    return room;
  }
  void skip(uint64_t nbytes, const Bytes& page, uint64_t at) {
    if (kind_ == Kind::kInPlace) {
      walk_ = Walk(page, at);
    } else {
      from_ += nbytes;
    }
  }
  void fetch_next(size_t nbytes) const {
    if (kind_ != Kind::kInPlace) fetch_ahead(from_, nbytes);
  }
  // What is unpacked where it came from is in the cache already.
  bool is_in_place() const { return kind_ == Kind::kInPlace; }

 private:
  const Kind kind_;
  Walk walk_{Bytes{nullptr, 0}, 0};
  const uint8_t* from_ = nullptr;
};

// The table of the page of `length` bytes that is packed in `nbytes`, and where its blocks begin. Null if
// there is none. Valid until this thread's next call.
const Block* read_table(Source& source, uint64_t nbytes, uint64_t length, uint64_t* start) {
  if (nbytes < sizeof(Header) || nbytes % kUnit != 0) return nullptr;
  Header header;
  uint8_t bytes_of_header[sizeof header];
  std::memcpy(&header, source.take(bytes_of_header, sizeof header), sizeof header);
  if (header.magic != kMagic || header.version != kVersion || header.length != length) return nullptr;
  const uint64_t n = n_blocks(length);
  const uint64_t ahead = nbytes - sizeof header;
  if (n > ahead / sizeof(Block)) return nullptr;
  thread_local std::vector<Block> table;
  table.resize(n);
  auto* const room = reinterpret_cast<uint8_t*>(table.data());
  const uint8_t* const bytes = source.take(room, n * sizeof(Block));
  if (bytes != room) std::memcpy(room, bytes, n * sizeof(Block));
  uint64_t payload = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const bool is_whole = (i + 1) * kBlockBytes <= length;
    if (static_cast<size_t>(table[i].layout) >= kLayouts) return nullptr;
    if (table[i].layout != Layout::kRaw && !is_whole) return nullptr;
    const uint64_t whole = is_whole ? kBlockBytes : length % kBlockBytes;
    if (payload_of(table[i], whole) > whole) return nullptr;
    payload += payload_of(table[i], whole);
  }
  const uint64_t table_end = sizeof header + n * sizeof(Block);
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
  source.skip(start - sizeof(Header) - n_blocks(length) * sizeof(Block), page, in_place + start);
  Walk to(page, 0);
  const bool is_past_cache = !source.is_in_place() && page.n_pieces > 0 && is_stored_past_cache(length);
  alignas(64) uint8_t packed[kBlockBytes];
  alignas(64) uint8_t apart[kBlockBytes];
  bool is_good = true;
  for (uint64_t i = 0; is_good && i * kBlockBytes < length; ++i) {
    const auto n = static_cast<size_t>(std::min<uint64_t>(kBlockBytes, length - i * kBlockBytes));
    const Block block = table[i];
    const uint8_t* const from = source.take(packed, payload_of(block, n));
    source.fetch_next(n);
    uint8_t* const together = to.together(n);
    uint8_t* const bytes = together != nullptr && !is_past_cache ? together : apart;
    if (block.layout == Layout::kRaw) {
      std::memcpy(bytes, from, n);
    } else {
      is_good = unpack_block(from, block, bytes);
    }
    if (sum != nullptr) sum->update(bytes, n);
    if (together == nullptr) to.scatter(apart, n);
    if (together != nullptr && is_past_cache) store_block(together, apart, n);
  }
  if (is_past_cache) fence_lines();
  return is_good;
}

}  // namespace

uint64_t Bytes::nbytes() const {
  uint64_t nbytes = 0;
  for (size_t i = 0; i < n_pieces; ++i) nbytes += static_cast<uint64_t>(pieces[i].nbytes);
  return nbytes;
}

uint64_t n_blocks(uint64_t length) {
  return length / kBlockBytes + (length % kBlockBytes != 0);
}

Size measure(const Bytes& page, Block* table) {
  const uint64_t length = page.nbytes();
  const Layout layout = layout_of(page, length);
  if (layout == Layout::kRaw) return {};
  uint64_t payload = 0;
  Walk walk(page, 0);
  alignas(64) uint8_t room[kBlockBytes];
  for (uint64_t i = 0; i * kBlockBytes < length; ++i) {
    const auto n = static_cast<size_t>(std::min<uint64_t>(kBlockBytes, length - i * kBlockBytes));
    table[i] = plan(next_block(walk, n, room), n == kBlockBytes ? layout : Layout::kRaw);
    payload += payload_of(table[i], n);
  }
  const uint64_t nbytes = sizeof(Header) + n_blocks(length) * sizeof(Block) + payload;
  const uint64_t rounded = (nbytes + kUnit - 1) / kUnit * kUnit;
  return rounded < length ? Size{rounded, payload, table} : Size{};
}

bool pack(const Bytes& page, const Size& size, uint8_t* to, Checksum* sum) {
  const uint64_t length = page.nbytes();
  const Header header{kMagic, kVersion, 0, length};
  const size_t table_nbytes = n_blocks(length) * sizeof(Block);
  std::memcpy(to, &header, sizeof header);
  std::memcpy(to + sizeof header, size.table, table_nbytes);
  const size_t start = size.nbytes - size.payload;
  std::memset(to + sizeof header + table_nbytes, 0, start - sizeof header - table_nbytes);
  Writer writer(to + start, is_stored_past_cache(length));
  Walk walk(page, 0);
  alignas(64) uint8_t room[kBlockBytes];
  bool is_good = true;
  for (uint64_t i = 0; is_good && i * kBlockBytes < length; ++i) {
    const auto n = static_cast<size_t>(std::min<uint64_t>(kBlockBytes, length - i * kBlockBytes));
    const uint8_t* const bytes = next_block(walk, n, room);
    sum->update(bytes, n);
    const Block block = size.table[i];
    if (block.layout == Layout::kRaw) {
      std::memcpy(writer.room(), bytes, n);
    } else {
      is_good = pack_block(bytes, block, writer.room());
    }
    writer.made(payload_of(block, n));
  }
  writer.finish();
  return is_good;
}

bool unpack(const uint8_t* from, uint64_t nbytes, const Bytes& page, Checksum* sum) {
  return unpack_from({Source::Kind::kStill, from}, nbytes, page, page.nbytes(), 0, sum);
}

bool unpack_shared(const uint8_t* from, uint64_t nbytes, const Bytes& page) {
  return unpack_from({Source::Kind::kShared, from}, nbytes, page, page.nbytes(), 0, nullptr);
}

bool unpack_in_place(const Bytes& page, uint64_t nbytes) {
  const uint64_t length = page.nbytes();
  if (nbytes >= length) return false;
  const uint64_t at = length - nbytes;
  return unpack_from(Source(page, at), nbytes, page, length, at, nullptr);
}

bool checksum_packed(const uint8_t* from, uint64_t nbytes, uint64_t length, uint64_t* checksum) {
  Checksum sum;
  if (!unpack_from({Source::Kind::kStill, from}, nbytes, Bytes{nullptr, 0}, length, 0, &sum)) return false;
  *checksum = sum.finish();
  return true;
}

std::string_view kernel_name() {
  return kernel().name;
}

}  // namespace p2pkv::codec
