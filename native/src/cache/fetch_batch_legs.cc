// A leg of a batch reads spans of one owner's region into one memory: this file says which spans these are,
// where they go, and what came of each.
#include <algorithm>
#include <vector>

#include "cache/fetch_batch.h"
#include "codec/packed.h"
#include "page/packed_location.h"

namespace p2pkv {

// Calls `take(first, end, to, remote)` for each span that a leg reads: the pieces [first, end) that it is
// for, where it goes, and where it comes from. What is unpacked where it lies goes nowhere by itself.
template <typename Take>
void FetchBatch::each_span(const Owner& owner, const Leg& leg, const Take& take) const {
  for (const size_t page : owner.pages) {
    const size_t first = page * n_pieces_, end = first + n_pieces_;
    uint64_t remote = locations_[page].offset;  // off the wire: it may be anything, and wrap
    if (is_taken_lent(page, leg)) {
      take(first, end, Piece{0, static_cast<int64_t>(stored_nbytes(locations_[page]))}, remote);
      continue;
    }
    uint64_t before = 0;
    for (size_t i = first; i < end; ++i) {
      const Piece part = read_part(page, i, before);
      before += static_cast<uint64_t>(pieces_[i].nbytes);
      if (memory_of_[i] == leg.memory && part.nbytes > 0) take(i, i + 1, part, remote);
      remote += static_cast<uint64_t>(part.nbytes);
    }
  }
}

// Where a page lies in several memories, a leg keeps only one of them open.
bool FetchBatch::is_taken_lent(size_t page, const Leg& leg) const {
  if (!leg.is_lent || (packed_nbytes(locations_[page]) == 0 && !taker_)) return false;
  const auto first = memory_of_.begin() + static_cast<ptrdiff_t>(page * n_pieces_);
  return std::all_of(first, first + static_cast<ptrdiff_t>(n_pieces_),
                     [&](int32_t memory) { return memory == leg.memory; });
}

FetchBatch::Plan FetchBatch::plan(const Owner& owner, const Leg& leg, int64_t base) const {
  Plan plan;
  plan.spans.reserve(owner.pages.size() * n_pieces_);
  plan.words.reserve(owner.pages.size() * n_pieces_);
  bool has_taken = false;
  each_span(owner, leg, [&](size_t first, size_t end, const Piece& to, uint64_t remote) {
    const size_t page = first / n_pieces_;
    const bool is_taken = is_taken_lent(page, leg);
    has_taken = has_taken || is_taken;
    plan.spans.push_back({is_taken ? 0 : to.address - base, static_cast<int64_t>(remote), to.nbytes});
    plan.words.push_back({locations_[page].word_offset, word_value(locations_[page])});
    if (leg.is_lent) plan.taken.push_back(is_taken ? page : Takes::kCopied);
  });
  if (!has_taken) plan.taken.clear();
  return plan;
}

void FetchBatch::take_lent(size_t page, const uint8_t* from) {
  if (taker_) return taker_->take(page, from);
  const codec::Bytes bytes{&pieces_[page * n_pieces_], n_pieces_};
  const bool is_good = codec::unpack_shared(from, packed_nbytes(locations_[page]), bytes);
  unpacked_[page] = is_good ? Unpacked::kDone : Unpacked::kFailed;
}

// What of a piece the owner's bytes are read into, if `before` bytes of the page lie in pieces before it: all
// of it, or, because a packed page is read into the end of all its pieces together, what belongs to that. It
// is never nothing for all pieces of a page.
Piece FetchBatch::read_part(size_t page, size_t piece, uint64_t before) const {
  const uint64_t packed = packed_nbytes(locations_[page]);
  if (packed == 0) return pieces_[piece];
  const uint64_t skipped = lengths_[page] - std::min(lengths_[page], packed);
  const auto whole = static_cast<uint64_t>(pieces_[piece].nbytes);
  const uint64_t n = before + whole - std::min(before + whole, std::max(before, skipped));
  return {pieces_[piece].address + static_cast<int64_t>(whole - n), static_cast<int64_t>(n)};
}

Status FetchBatch::land(const Owner& owner, const Leg& leg, const std::vector<Status>& statuses) {
  size_t next = 0;
  each_span(owner, leg, [&](size_t first, size_t end, const Piece&, uint64_t) {
    if (next == statuses.size()) return;
    std::fill(of_pieces_.begin() + static_cast<ptrdiff_t>(first),
              of_pieces_.begin() + static_cast<ptrdiff_t>(end), statuses[next++]);
  });
  return statuses.empty() ? Status::kOk : *std::max_element(statuses.begin(), statuses.end());
}

}  // namespace p2pkv
