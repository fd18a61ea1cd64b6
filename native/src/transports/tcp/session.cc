#include "transports/tcp/session.h"

#include <poll.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/checked.h"
#include "base/clock.h"
#include "page/words.h"

namespace p2pkv::tcp {
namespace {

constexpr size_t kMaxSentPieces = 256;  // at a time; the kernel takes up to 1024, a record of these

}  // namespace

void Session::serve() {
  while (receive_request() && respond()) {
  }
}

bool Session::receive_request() {
  RequestHeader header;
  if (!receive_exactly(&header, sizeof header, true)) return false;
  // The count is checked before anything is allocated for it.
  const bool is_ours = header.magic == kRequestMagic && header.version == kFrameVersion && header.flags == 0;
  if (!is_ours || header.n_spans == 0 || header.n_spans > kMaxSpans) return false;
  request_id_ = header.id;
  *used_ns_ = steady_now_ns();
  spans_.resize(header.n_spans);
  return receive_exactly(spans_.data(), spans_.size() * sizeof(SpanRequest), false) && are_spans_valid();
}

// The reader has refused what is out of range already: one that asks for it here is not one of ours.
bool Session::are_spans_valid() {
  std::shared_ptr<RegisteredRegion> region;
  uint32_t region_id = 0;
  for (size_t i = 0; i < spans_.size(); ++i) {
    SpanRequest& span = spans_[i];
    if (i == 0 || span.region != region_id) {
      region_id = span.region;
      region = regions_->find(region_id);
    }
    if (span.want_word > 1) return false;
    if (!region) {
      span.region = 0;  // and stays unknown, whatever is registered until it is answered
      continue;
    }
    const uint64_t nbytes = region->nbytes();
    const bool bytes_fit = lies_within(span.offset, span.length, nbytes);
    const bool word_fits = span.want_word == 0 || word_lies_within(span.word_offset, nbytes);
    if (!bytes_fit || !word_fits) return false;
  }
  return true;
}

bool Session::respond() {
  size_t first = 0;
  uint64_t skip = 0;
  while (first < spans_.size()) {
    const Chunk chunk = plan_chunk(first, skip);
    uint64_t n_before = 0;  // bytes of the chunk up to the end of its last ended span
    for (size_t i = first; i < first + chunk.n_ended; ++i) n_before += spans_[i].length;
    n_before -= chunk.n_ended > 0 ? skip : 0;
    first += chunk.n_ended;
    // A chunk ends at a span's end or within the one span that goes on in the next chunk.
    skip = chunk.region ? chunk.nbytes - n_before + (chunk.n_ended > 0 ? 0 : skip) : 0;
    if (!send_chunk(chunk, first == spans_.size())) return false;
  }
  return flush();
}

Session::Chunk Session::plan_chunk(size_t first, uint64_t skip) {
  const uint32_t region = spans_[first].region;
  Chunk chunk{regions_->find(region), first, skip, 0, 0};
  for (size_t i = first; i < spans_.size() && spans_[i].region == region; ++i) {
    const uint64_t left = spans_[i].length - (i == first ? skip : 0);
    const uint64_t room = kMaxChunkBytes - chunk.nbytes;
    if (chunk.region && left > room) {
      chunk.nbytes += room;
      break;
    }
    if (chunk.region) chunk.nbytes += left;
    ++chunk.n_ended;
  }
  return chunk;
}

bool Session::send_chunk(const Chunk& chunk, bool is_last) {
  const auto status = chunk.region ? ChunkStatus::kOk : ChunkStatus::kRegionGone;
  const ChunkHeader header{kChunkMagic, static_cast<uint32_t>(status),
                           request_id_, static_cast<uint32_t>(chunk.n_ended),
                           0,           chunk.nbytes};
  if (!chunk.region) return send_exactly(&header, sizeof header, is_last);
  bool is_gone = false;
  return send_exactly(&header, sizeof header, false) && send_bytes(chunk, &is_gone) &&
         send_trailer(chunk, is_gone, is_last);
}

bool Session::send_bytes(const Chunk& chunk, bool* is_gone) {
  static const std::array<uint8_t, 65536> filler{};
  size_t at = chunk.first;  // the span to go on with
  uint64_t done = chunk.skip;
  for (uint64_t left = chunk.nbytes; left > 0;) {
    std::array<iovec, kMaxSentPieces> pieces;
    size_t n_pieces = 0;
    uint64_t room = left;
    for (size_t i = at; n_pieces < kMaxSentPieces && room > 0; ++i) {
      const uint64_t skip = i == at ? done : 0;
      const uint64_t nbytes = std::min(room, spans_[i].length - skip);
      if (nbytes > 0) pieces[n_pieces++] = {chunk.region->base() + spans_[i].offset + skip, nbytes};
      room -= nbytes;
    }
    // No more than of the pieces: that is what the reader has room for at a time.
    const iovec zeros{const_cast<uint8_t*>(filler.data()), std::min<uint64_t>(left - room, filler.size())};
    size_t n = 0;
    Wire::Progress progress;
    {
      const RegisteredRegion::Use use(*chunk.region);
      *is_gone |= !use;
      progress = use ? wire_->send(connection_, pieces.data(), n_pieces, false, &n)
                     : wire_->send(connection_, &zeros, 1, false, &n);
    }
    if (progress == Wire::Progress::kLost) return false;
    if (progress == Wire::Progress::kBlocked && !wait_for(POLLOUT, kStallMs)) return false;
    left -= n;
    for (done += n; left > 0 && done >= spans_[at].length; ++at) done -= spans_[at].length;
  }
  return true;
}

bool Session::send_trailer(const Chunk& chunk, bool is_gone, bool is_last) {
  trailer_.assign(sizeof(ChunkTrailer), 0);
  ChunkTrailer trailer{};
  {
    const RegisteredRegion::Use use(*chunk.region);
    is_gone |= !use;
    for (size_t i = chunk.first; i < chunk.first + chunk.n_ended; ++i) {
      if (spans_[i].want_word == 0) continue;
      const uint64_t word = is_gone ? 0 : load_word_after_bytes(chunk.region->base() + spans_[i].word_offset);
      const auto* bytes = reinterpret_cast<const uint8_t*>(&word);
      trailer_.insert(trailer_.end(), bytes, bytes + sizeof word);
      ++trailer.n_words;
    }
  }
  trailer.status = static_cast<uint32_t>(is_gone ? ChunkStatus::kRegionGone : ChunkStatus::kOk);
  std::memcpy(trailer_.data(), &trailer, sizeof trailer);
  return send_exactly(trailer_.data(), trailer_.size(), is_last);
}

bool Session::receive_exactly(void* to, size_t nbytes, bool may_idle) {
  auto* at = static_cast<uint8_t*>(to);
  while (nbytes > 0) {
    const iovec piece{at, nbytes};
    size_t n = 0;
    const Wire::Progress progress = wire_->receive(connection_, &piece, 1, &n);
    if (progress == Wire::Progress::kLost) return false;
    const bool is_idle = may_idle && at == to;
    if (progress == Wire::Progress::kBlocked && !wait_for(POLLIN, is_idle ? -1 : kStallMs)) return false;
    at += n;
    nbytes -= n;
  }
  return true;
}

bool Session::send_exactly(const void* from, size_t nbytes, bool is_last) {
  const auto* at = static_cast<const uint8_t*>(from);
  while (nbytes > 0) {
    const iovec piece{const_cast<uint8_t*>(at), nbytes};
    size_t n = 0;
    const Wire::Progress progress = wire_->send(connection_, &piece, 1, is_last, &n);
    if (progress == Wire::Progress::kLost) return false;
    if (progress == Wire::Progress::kBlocked && !wait_for(POLLOUT, kStallMs)) return false;
    at += n;
    nbytes -= n;
  }
  return true;
}

// Returns once all that the wire has taken is with the kernel.
bool Session::flush() {
  for (;;) {
    const Wire::Progress progress = wire_->flush(connection_);
    if (progress != Wire::Progress::kBlocked) return progress == Wire::Progress::kMoved;
    if (!wait_for(POLLOUT, kStallMs)) return false;
  }
}

bool Session::wait_for(short events, int timeout_ms) {
  pollfd fds[] = {{stop_, POLLIN, 0}, {connection_, events, 0}};
  const int n = poll(fds, 2, timeout_ms);
  if (n < 0) return errno == EINTR;
  return n > 0 && fds[0].revents == 0;
}

}  // namespace p2pkv::tcp
