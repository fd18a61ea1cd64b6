#include "transports/verbs/plan.h"

#include <algorithm>

namespace p2pkv::verbs {

void ReadPlan::append(const std::vector<uint32_t>& share) {
  uint64_t n_bytes = 0;
  uint32_t n_words = 0;
  uint64_t last_word = kNoWord;
  for (const uint32_t number : share) {
    const uint64_t word = is_validated(number) ? words_[number].offset : kNoWord;
    const bool is_new_word = word != kNoWord && word != last_word;
    const auto n_spans = static_cast<uint32_t>(expected_.size()) - first_expected_;
    if (n_bytes >= kChunkBytes || n_spans >= kChunkSpans || (is_new_word && n_words == kChunkWords)) {
      end_chunk();
      n_bytes = n_words = 0;
    }
    add_bytes(spans_[number]);
    expected_.push_back({number, kNoSlot});
    n_bytes += static_cast<uint64_t>(spans_[number].length);
    n_words += is_new_word || (n_words == 0 && word != kNoWord);
    last_word = word;
  }
  if (expected_.size() > first_expected_) end_chunk();
}

// Spans that lie behind one another at the peer are one read, whose pieces go where each belongs here.
void ReadPlan::add_bytes(const Span& span) {
  auto remote = static_cast<uint64_t>(span.remote);
  auto local = static_cast<uint64_t>(span.local);
  for (auto left = static_cast<uint64_t>(span.length); left > 0;) {
    PlannedRead* last = reads_.size() > chunk_begin() ? &reads_.back() : nullptr;
    bool goes_on = last && last->remote + last->nbytes == remote && last->nbytes < limits_.message;
    const bool extends_piece = goes_on && pieces_.back().at + pieces_.back().nbytes == local;
    goes_on = goes_on && (extends_piece || last->n_pieces < limits_.pieces);
    if (!goes_on) {
      reads_.push_back({remote, 0, static_cast<uint32_t>(pieces_.size()), 0, false, false, false});
      last = &reads_.back();
    }
    const auto n = static_cast<uint32_t>(std::min(left, limits_.message - last->nbytes));
    if (goes_on && extends_piece) {
      pieces_.back().nbytes += n;
    } else {
      pieces_.push_back({local, n});
      ++last->n_pieces;
    }
    last->nbytes += n;
    remote += n;
    local += n;
    left -= n;
  }
}

void ReadPlan::add_words() {
  by_offset_.clear();
  for (auto i = first_expected_; i < expected_.size(); ++i) {
    if (is_validated(expected_[i].span)) by_offset_.emplace_back(words_[expected_[i].span].offset, i);
  }
  std::sort(by_offset_.begin(), by_offset_.end());
  const auto slot_base = static_cast<uint32_t>(chunks_.size() % kChunksInFlight) * kChunkWordBytes;
  const size_t first_read = reads_.size();
  uint32_t used = 0;
  for (size_t i = 0; i < by_offset_.size(); ++i) {
    const auto [offset, who] = by_offset_[i];
    PlannedRead* last = reads_.size() > first_read ? &reads_.back() : nullptr;
    const uint64_t end = last ? last->remote + last->nbytes : 0;
    const bool is_covered = last && offset < end;
    // Room is kept for those to come, which may each need a read of its own.
    const uint64_t gap = last ? offset - std::min(offset, end) : 0;
    const uint64_t left = std::min<uint64_t>(by_offset_.size() - i, kChunkWords);  // at most so many differ
    const bool goes_on = last && gap <= kWordGap && used + gap + 8 * left <= kChunkWordBytes &&
                         last->nbytes + gap + 8 <= limits_.message;
    if (!is_covered && goes_on) {
      const auto more = static_cast<uint32_t>(gap + 8);
      last->nbytes += more;
      pieces_.back().nbytes += more;
      used += more;
    } else if (!is_covered) {
      reads_.push_back({offset, 8, static_cast<uint32_t>(pieces_.size()), 1, true, !last, false});
      pieces_.push_back({slot_base + used, 8});
      last = &reads_.back();
      used += 8;
    }
    expected_[who].slot = static_cast<uint32_t>(pieces_.back().at + (offset - last->remote));
  }
}

void ReadPlan::end_chunk() {
  const uint32_t begin = chunk_begin();
  add_words();
  if (reads_.size() > begin) reads_.back().ends_chunk = true;
  chunks_.push_back({first_expected_, static_cast<uint32_t>(expected_.size()) - first_expected_,
                     static_cast<uint32_t>(reads_.size())});
  first_expected_ = static_cast<uint32_t>(expected_.size());
}

}  // namespace p2pkv::verbs
