#include "base/exact_blocks.h"

#include <bit>

namespace p2pkv {
namespace {

// Blocks of its own bin that a search looks at before it takes a longer one. A guess; not tuned.
constexpr int kMostLooks = 8;

}  // namespace

ExactBlocks::ExactBlocks(uint32_t n_granules) : blocks_(n_granules), kinds_(n_granules) {
  bins_.fill(kNone);
  if (n_granules == 0) return;
  tag(0, n_granules, Kind::kFree);
  bin(0);
}

// Exact below sixteen granules, then sixteen bins an octave.
uint32_t ExactBlocks::bin_of(uint32_t length) {
  if (length < kBinsPerRow) return length;
  const auto octave = static_cast<uint32_t>(std::bit_width(length)) - 1;
  return (octave - 3) * kBinsPerRow + ((length >> (octave - 4)) & (kBinsPerRow - 1));
}

void ExactBlocks::tag(uint32_t block, uint32_t length, Kind kind) {
  blocks_[block].length = length;
  blocks_[block + length - 1].start = block;
  kinds_[block] = kind;
}

void ExactBlocks::bin(uint32_t block) {
  const uint32_t bin = bin_of(blocks_[block].length);
  const uint32_t next = bins_[bin];
  blocks_[block].next = next;
  blocks_[block].previous = kNone;
  if (next != kNone) blocks_[next].previous = block;
  bins_[bin] = block;
  bins_used_[bin / kBinsPerRow] |= 1u << bin % kBinsPerRow;
  rows_used_ |= 1u << bin / kBinsPerRow;
  n_free_ += blocks_[block].length;
}

void ExactBlocks::unbin(uint32_t block) {
  const uint32_t bin = bin_of(blocks_[block].length);
  const uint32_t next = blocks_[block].next;
  const uint32_t previous = blocks_[block].previous;
  (previous == kNone ? bins_[bin] : blocks_[previous].next) = next;
  if (next != kNone) blocks_[next].previous = previous;
  n_free_ -= blocks_[block].length;
  if (bins_[bin] != kNone) return;
  const uint32_t row = bin / kBinsPerRow;
  bins_used_[row] &= ~(1u << bin % kBinsPerRow);
  if (bins_used_[row] == 0) rows_used_ &= ~(1u << row);
}

// The first block of this bin or, if it is empty, of the next one that is not.
uint32_t ExactBlocks::first_from(uint32_t bin) const {
  const uint32_t row = bin / kBinsPerRow;
  if (row >= kRows) return kNone;
  const uint32_t in_row = bins_used_[row] >> bin % kBinsPerRow << bin % kBinsPerRow;
  if (in_row != 0) return bins_[row * kBinsPerRow + static_cast<uint32_t>(std::countr_zero(in_row))];
  const uint32_t above = row + 1 < kRows ? rows_used_ >> (row + 1) << (row + 1) : 0;
  if (above == 0) return kNone;
  const auto next = static_cast<uint32_t>(std::countr_zero(above));
  return bins_[next * kBinsPerRow + static_cast<uint32_t>(std::countr_zero(bins_used_[next]))];
}

uint32_t ExactBlocks::around(uint32_t granule) const {
  while (kinds_[granule] == Kind::kInside) --granule;
  return granule;
}

bool ExactBlocks::is_taken_whole(uint32_t block, uint32_t n_granules) const {
  if (kinds_[block] != Kind::kTaken || blocks_[block].length != n_granules) return false;
  const uint32_t last = block + n_granules - 1;
  if (blocks_[last].start != block) return false;
  if (last + 1 < this->n_granules() && !starts_block(last + 1)) return false;
  const uint32_t neighbour = before(block);
  return neighbour == kNone || (starts_block(neighbour) && neighbour + blocks_[neighbour].length == block);
}

uint32_t ExactBlocks::find(uint32_t n_granules) const {
  if (n_granules > this->n_granules()) return kNone;
  const uint32_t bin = bin_of(n_granules);
  uint32_t block = bins_[bin];
  for (int looks = 0; block != kNone && looks < kMostLooks; ++looks) {  // a few of its own bin may fit
    if (blocks_[block].length >= n_granules) return block;
    block = blocks_[block].next;
  }
  return first_from(bin + 1);
}

uint32_t ExactBlocks::find_longest() const {
  if (rows_used_ == 0) return kNone;
  const auto row = static_cast<uint32_t>(std::bit_width(rows_used_)) - 1;
  const auto column = static_cast<uint32_t>(std::bit_width(bins_used_[row])) - 1;
  return bins_[row * kBinsPerRow + column];
}

uint32_t ExactBlocks::allocate(uint32_t n_granules) {
  const uint32_t block = find(n_granules);
  if (block != kNone) take(block, n_granules);
  return block;
}

void ExactBlocks::take(uint32_t block, uint32_t n_granules) {
  unbin(block);
  const uint32_t length = blocks_[block].length;
  tag(block, n_granules, Kind::kTaken);
  if (length == n_granules) return;
  tag(block + n_granules, length - n_granules, Kind::kFree);
  bin(block + n_granules);
}

void ExactBlocks::release(uint32_t block) {
  uint32_t length = blocks_[block].length;
  if (const uint32_t behind = block + length; behind < n_granules() && is_free(behind)) {
    unbin(behind);
    kinds_[behind] = Kind::kInside;
    length += blocks_[behind].length;
  }
  if (const uint32_t neighbour = before(block); neighbour != kNone && is_free(neighbour)) {
    unbin(neighbour);
    kinds_[block] = Kind::kInside;
    length += blocks_[neighbour].length;
    block = neighbour;
  }
  tag(block, length, Kind::kFree);
  bin(block);
}

void ExactBlocks::absorb(uint32_t block) {
  const uint32_t behind = block + blocks_[block].length;
  if (is_free(behind)) unbin(behind);
  kinds_[behind] = Kind::kInside;
  tag(block, blocks_[block].length + blocks_[behind].length, Kind::kTaken);
}

void ExactBlocks::split(uint32_t block, uint32_t n_granules) {
  const uint32_t length = blocks_[block].length;
  tag(block, n_granules, Kind::kTaken);
  tag(block + n_granules, length - n_granules, Kind::kTaken);
}

}  // namespace p2pkv
