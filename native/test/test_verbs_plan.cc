// The order in which the verbs transport reads bytes and words, carried out here on plain memory.
#include <cstring>
#include <numeric>
#include <random>

#include "check.h"
#include "seed.h"
#include "transports/verbs/plan.h"

using namespace p2pkv;
using namespace p2pkv::verbs;

namespace {

constexpr ReadPlan::Limits kLimits{4, 64 * 1024};

std::vector<uint32_t> all(size_t n) {
  std::vector<uint32_t> share(n);
  std::iota(share.begin(), share.end(), 0);
  return share;
}

size_t count(const ReadPlan& plan, bool is_words) {
  size_t n = 0;
  for (const PlannedRead& read : plan.reads()) n += read.is_words == is_words;
  return n;
}

// Every chunk: bytes, then words, the first of them fenced, the last read marked. What each read covers is
// what its pieces take.
void check_shape(const ReadPlan& plan) {
  uint32_t begin = 0;
  for (const ReadPlan::Chunk& chunk : plan.chunks()) {
    bool in_words = false;
    for (uint32_t i = begin; i < chunk.end_read; ++i) {
      const PlannedRead& read = plan.reads()[i];
      CHECK_EQ(read.is_fenced, read.is_words && !in_words);
      CHECK(!in_words || read.is_words);
      in_words = read.is_words;
      CHECK_EQ(read.ends_chunk, i + 1 == chunk.end_read);
      CHECK(read.n_pieces >= 1 && read.n_pieces <= kLimits.pieces && read.nbytes <= kLimits.message);
      uint64_t total = 0;
      for (uint32_t p = 0; p < read.n_pieces; ++p) total += plan.pieces()[read.first_piece + p].nbytes;
      CHECK_EQ(total, uint64_t{read.nbytes});
    }
    begin = chunk.end_read;
  }
  CHECK_EQ(size_t{begin}, plan.reads().size());
}

// Does what the device would, chunk by chunk, and what the lane would with the words.
void carry_out(const ReadPlan& plan, const std::vector<uint8_t>& remote, std::vector<uint8_t>* local,
               std::vector<uint64_t>* words) {
  std::vector<uint8_t> buffer(kChunksInFlight * kChunkWordBytes);
  uint32_t begin = 0;
  for (const ReadPlan::Chunk& chunk : plan.chunks()) {
    for (uint32_t i = begin; i < chunk.end_read; ++i) {
      const PlannedRead& read = plan.reads()[i];
      const uint8_t* from = remote.data() + read.remote;
      for (uint32_t p = 0; p < read.n_pieces; ++p) {
        const Piece& piece = plan.pieces()[read.first_piece + p];
        auto& to = read.is_words ? buffer : *local;
        CHECK(piece.at + piece.nbytes <= to.size());
        std::memcpy(to.data() + piece.at, from, piece.nbytes);
        from += piece.nbytes;
      }
    }
    for (uint32_t i = 0; i < chunk.n_expected; ++i) {
      const auto& expected = plan.expected()[chunk.first_expected + i];
      if (expected.slot != ReadPlan::kNoSlot)
        std::memcpy(&(*words)[expected.span], buffer.data() + expected.slot, 8);
    }
    begin = chunk.end_read;
  }
}

}  // namespace

TEST(verbs_reads_spans_that_adjoin_at_the_peer_at_once) {
  std::vector<Span> spans;
  for (int64_t i = 0; i < 8; ++i) spans.push_back({i * 4096, 65536 + i * 1024, 1024});
  const std::vector<Word> words(8, Word{16, 2});
  ReadPlan plan(spans, words, kLimits);
  plan.append(all(8));
  check_shape(plan);
  CHECK_EQ(count(plan, false), size_t{2});  // 4 pieces each
  CHECK_EQ(count(plan, true), size_t{1});
}

TEST(verbs_reads_words_of_a_neighbourhood_at_once) {
  std::vector<Span> spans;
  std::vector<Word> words;
  for (int64_t i = 0; i < 32; ++i) {
    spans.push_back({i * 65536, 4096 + i * 65536, 65536});
    words.push_back({static_cast<uint64_t>(i) * 128, 2});  // one for each 4 KiB
  }
  words[31].offset = 1 << 20;
  ReadPlan plan(spans, words, kLimits);
  plan.append(all(32));
  check_shape(plan);
  CHECK_EQ(count(plan, true), size_t{2});
}

TEST(verbs_splits_what_a_message_does_not_hold) {
  const std::vector<Span> spans{{0, 0, 200'000}, {200'000, 300'000, 0}};
  const std::vector<Word> words;
  ReadPlan plan(spans, words, kLimits);
  plan.append(all(2));
  check_shape(plan);
  CHECK_EQ(plan.reads().size(), size_t{4});
}

TEST(verbs_plans_read_every_byte_and_word_of_random_batches) {
  std::mt19937_64 random(test::seed("verbs_plans"));
  const auto below = [&](uint64_t n) { return random() % n; };
  std::vector<uint8_t> remote(24 << 20);
  for (auto& byte : remote) byte = static_cast<uint8_t>(random());
  for (int round = 0; round < 30; ++round) {
    std::vector<uint8_t> local(remote.size()), wanted(remote.size());
    std::vector<Span> spans;
    std::vector<Word> words;
    const uint64_t longest = 1 + below(200'000);
    for (uint64_t at = 0; spans.size() < 6000;) {
      const uint64_t length = below(longest);
      if (at + length > local.size()) break;
      spans.push_back({static_cast<int64_t>(at), static_cast<int64_t>(below(remote.size() - length)),
                       static_cast<int64_t>(length)});
      if (below(2) && spans.size() > 1) {
        const Span& before = spans[spans.size() - 2];
        if (before.remote + before.length + static_cast<int64_t>(length) <=
            static_cast<int64_t>(remote.size()))
          spans.back().remote = before.remote + before.length;
      }
      words.push_back({below(4) ? 8 * below(below(2) ? 4096 : remote.size() / 8) : kNoWord, 0});
      if (below(2) && words.size() > 1) words.back() = words[words.size() - 2];
      std::memcpy(wanted.data() + at, remote.data() + spans.back().remote, length);
      at += length + below(3);
    }
    ReadPlan plan(spans, words, kLimits);
    const auto share = all(spans.size());
    const auto half = share.begin() + static_cast<int64_t>(share.size() / 2);
    plan.append({share.begin(), half});
    plan.append({half, share.end()});
    check_shape(plan);
    std::vector<uint64_t> got(spans.size());
    carry_out(plan, remote, &local, &got);
    CHECK(local == wanted);
    for (size_t i = 0; i < spans.size(); ++i) {
      if (words[i].offset == kNoWord) continue;
      uint64_t expected;
      std::memcpy(&expected, remote.data() + words[i].offset, 8);
      CHECK_EQ(got[i], expected);
    }
  }
}
