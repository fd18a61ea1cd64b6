// Pages that lie in the pool in their packed form (codec/packed.h).
#include <algorithm>
#include <bit>

#include "base/copy_team.h"
#include "pool/pool.h"

namespace p2pkv {
namespace {

// Packed pages of one length have many, and each number of granules is a size of its own to PageBlocks, which
// keeps 64 of them. So they are rounded up to as many classes an octave. docs/performance.md has what that
// costs.
constexpr uint64_t kClassesPerOctave = 32;

constexpr uint64_t kMostPackedInPool = ((uint64_t{1} << 24) - 1) * kPackedUnit;

codec::Bytes bytes_of(const PageBatch& batch, size_t i) {
  return {batch.pieces + i * batch.n_pieces, batch.n_pieces};
}

uint64_t nanoseconds_since(int64_t began) {
  return static_cast<uint64_t>(std::max<int64_t>(0, steady_now_ns() - began));
}

}  // namespace

// What pages that are not there yet take when they are packed. Returns what the drafts' sizes point to.
std::vector<codec::Block> Pool::measure(const PageBatch& batch, std::vector<Draft>* drafts,
                                        const Deadline& deadline) {
  std::vector<size_t> fresh;
  std::vector<size_t> first_block;  // of each of these
  uint64_t nbytes = 0;
  size_t n_blocks = 0;
  {
    const Lock lock(mutex_);
    for (size_t i = 0; i < batch.n_pages; ++i) {
      if (pages_.find(batch.keys[i]) != PageTable::kNone) continue;
      fresh.push_back(i);
      first_block.push_back(n_blocks);
      n_blocks += codec::n_blocks((*drafts)[i].length);
      nbytes += (*drafts)[i].length;
    }
  }
  if (fresh.empty() || !packing_.is_wanted(nbytes)) return {};
  std::vector<codec::Block> tables(n_blocks);
  const auto measure_page = [&](size_t k) {
    Draft& draft = (*drafts)[fresh[k]];
    const int64_t began = steady_now_ns();
    draft.packed = codec::measure(bytes_of(batch, fresh[k]), tables.data() + first_block[k]);
    Draft as_it_is;
    as_it_is.length = draft.length;
    if (draft.packed.nbytes > kMostPackedInPool || granules_of(draft) >= granules_of(as_it_is))
      draft.packed = {};
    draft.pack_ns = nanoseconds_since(began);
    if (draft.packed.nbytes == 0)
      packing_.tried(draft.length, granules_of(draft) * options_.granule, false, draft.pack_ns);
  };
  make_copies({fresh.size(), nbytes, std::ref(measure_page)}, [&] { return deadline.passed(); });
  return tables;
}

uint64_t Pool::granules_of(const Draft& draft) const {
  const uint64_t nbytes = draft.stored();
  const uint64_t n = nbytes / options_.granule + (nbytes % options_.granule != 0);
  if (draft.packed.nbytes == 0) return n;
  const uint64_t step = std::max<uint64_t>(1, std::bit_floor(n) / kClassesPerOctave);
  return (n + step - 1) / step * step;
}

bool Pool::pack_in(const PageBatch& batch, size_t i, Draft* draft) {
  const int64_t began = steady_now_ns();
  Checksum sum;
  if (!codec::pack(bytes_of(batch, i), draft->packed, data_at(draft->granule), &sum)) return false;
  draft->checksum = sum.finish();
  packing_.tried(draft->length, granules_of(*draft) * options_.granule, true,
                 draft->pack_ns + nanoseconds_since(began));
  return true;
}

bool Pool::unpack_out(const PageBatch& batch, size_t i, uint32_t granule) const {
  return codec::unpack(data_at(granule), pages_[granule].packed * kPackedUnit, bytes_of(batch, i));
}

}  // namespace p2pkv
