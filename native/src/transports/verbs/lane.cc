#include "transports/verbs/lane.h"

#include <poll.h>

#include <algorithm>

#include "base/clock.h"

namespace p2pkv::verbs {
namespace {

// 256 reads of a page of 64 KiB are 16 MiB: more than any link holds. 8 pieces are a page in 8 layers' worth
// of places; more make the device's entries larger than they are worth (a guess).
constexpr uint32_t kDepth = 256;
constexpr uint32_t kPieces = 8;
// Longer ones gain nothing (cards are at full speed from 16 KiB), and with 16 or more on their way at a time
// they flood what has small queues, as Soft-RoCE has.
constexpr uint64_t kMaxRead = 64 << 10;
// A completion each is cheap beside 256 KiB; without one a lane that is slow would look like one that was
// cut.
constexpr uint64_t kSignalBytes = 256 << 10;
constexpr double kGoodByeS = 0.02;

constexpr uint64_t kProbeId = UINT64_MAX;
constexpr uint64_t kGoodByeId = UINT64_MAX - 1;
constexpr uint64_t kReceiveId = UINT64_MAX - 2;
constexpr uint64_t kPushId = UINT64_MAX - 3;
constexpr uint32_t kExtraRequests = 2;  // a probe and a good-bye beside the reads

Lane::Progress why(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_REM_ACCESS_ERR:  // and nothing else: what is refused is struck from the directory
      return Lane::Progress::kRefused;
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
      return Lane::Progress::kLocalClosed;
    default:
      return Lane::Progress::kLost;
  }
}

}  // namespace

std::unique_ptr<Lane> Lane::create(std::shared_ptr<Rail> rail, uint8_t rail_number, bool reaches_devices,
                                   std::string* error) {
  std::unique_ptr<Lane> lane(new Lane);
  const ibv_device_attr& limits = rail->limits();
  lane->rail_ = rail;
  lane->rail_number_ = rail_number;
  lane->depth_ = std::min<uint32_t>(kDepth, static_cast<uint32_t>(limits.max_qp_wr) - kExtraRequests);
  const int max_pieces = limits.max_sge_rd > 0 ? std::min(limits.max_sge, limits.max_sge_rd) : limits.max_sge;
  lane->max_pieces_ = std::clamp<uint32_t>(static_cast<uint32_t>(max_pieces), 1, kPieces);
  lane->word_memory_ =
      Registration::create({rail}, lane->word_buffer_.base(), lane->word_buffer_.nbytes(), false, error);
  if (!lane->word_memory_) return nullptr;
  // Unsignalled reads report too when the pair fails.
  const uint32_t n_entries = lane->depth_ + kExtraRequests + 1 + Loopback::kCompletions;
  lane->completions_ = CompletionQueue::create(rail, n_entries, error);
  if (!lane->completions_) return nullptr;
  if (reaches_devices) {
    lane->loopback_ = Loopback::create(rail, *lane->completions_, kPushId, error);
    if (!lane->loopback_) return nullptr;
  }
  const QueuePair::Depths depths{lane->depth_ + kExtraRequests, lane->max_pieces_};
  lane->pair_ = QueuePair::create(std::move(rail), *lane->completions_, depths, error);
  return lane->pair_ ? std::move(lane) : nullptr;
}

void Lane::connect(const LaneBlob& peer, uint32_t first_packet, Connector& connector) {
  peer_rail_ = peer.rail;
  pair_->post_receive(kReceiveId);
  outcome_ = connector.connect({completions_, pair_, peer, first_packet});
}

void Lane::begin(const BatchMemory& batch, const std::vector<uint32_t>& share) {
  if (!batch_) {
    batch_.emplace(batch);
    const uint64_t message = std::min(kMaxRead, rail_->max_message());
    plan_.emplace(batch.spans, batch.words, ReadPlan::Limits{max_pieces_, message});
    n_posted_ = n_signalled_ = n_arrived_ = n_landed_ = n_chunks_posted_ = n_chunks_settled_ = 0;
  }
  asked_at_ = Clock::now();
  plan_->append(share);
}

void Lane::post_first() {
  bool has_moved = false;
  if (is_alive() && !is_connecting() && !post(&has_moved)) destroy();
}

Lane::Progress Lane::advance() {
  if (!is_alive()) return Progress::kLost;
  if (is_connecting()) return Progress::kBlocked;
  bool has_moved = false;
  const Progress progress = take_completions(&has_moved);
  const bool is_pushing = progress != Progress::kMoved || push_to_device();
  settle_chunks();
  if (progress != Progress::kMoved) return progress;
  if (!is_pushing) return Progress::kLost;
  if (n_chunks_settled_ == plan_->chunks().size()) return Progress::kDone;
  if (!post(&has_moved)) return Progress::kLost;
  return has_moved ? Progress::kMoved : Progress::kBlocked;
}

Lane::Progress Lane::take_completions(bool* has_moved) {
  ibv_wc completions[16];
  int n;
  while ((n = completions_->poll(completions, 16)) > 0) {
    const auto now = Clock::now();
    longest_silence_ = std::max(longest_silence_, now - silent_since());
    heard_at_ = now;
    *has_moved = true;
    for (int i = 0; i < n; ++i) {
      const ibv_wc& completion = completions[i];
      // The first that failed says why; the others were flushed for its sake.
      if (completion.status != IBV_WC_SUCCESS) return why(completion.status);
      if (completion.wr_id == kReceiveId) return Progress::kLost;  // the peer said good-bye
      if (completion.wr_id == kProbeId) {
        is_proven_ = true;
        is_probing_ = is_pinged_ = false;
      } else if (completion.wr_id == kPushId) {
        if (loopback_->completed()) n_landed_ = n_pushing_;
      } else {
        n_arrived_ = static_cast<uint32_t>(completion.wr_id);
      }
    }
  }
  return n < 0 ? Progress::kLost : Progress::kMoved;
}

// Has the bytes of chunks that have arrived pushed to the device that they are for: a rail may report reads
// whose bytes the device does not have yet. False if that can't be had.
bool Lane::push_to_device() {
  if (!batch_->local.is_on_device()) {
    n_landed_ = n_arrived_;
    return true;
  }
  if (!loopback_) return false;
  const auto& chunks = plan_->chunks();
  uint32_t n_whole = n_landed_;
  for (size_t i = n_chunks_settled_; i < chunks.size() && chunks[i].end_read <= n_arrived_; ++i)
    n_whole = chunks[i].end_read;
  if (n_whole == n_landed_ || loopback_->is_under_way()) return true;
  // Any byte of the memory will do: what the rail has written before is pushed, wherever it lies.
  n_pushing_ = n_whole;
  return loopback_->begin(batch_->local.address(), batch_->local.local_key(rail_number_), 1);
}

void Lane::settle_chunks() {
  const auto& chunks = plan_->chunks();
  while (n_chunks_settled_ < chunks.size() && chunks[n_chunks_settled_].end_read <= n_landed_) {
    const ReadPlan::Chunk& chunk = chunks[n_chunks_settled_++];
    for (uint32_t i = 0; i < chunk.n_expected; ++i) {
      const ReadPlan::Expected& expected = plan_->expected()[chunk.first_expected + i];
      bool is_good = true;
      if (expected.slot != ReadPlan::kNoSlot) {
        is_good = load_word(word_buffer_.base() + expected.slot) == batch_->words[expected.span].value;
      }
      batch_->statuses[expected.span] = is_good ? Status::kOk : Status::kRejected;
    }
  }
}

// Posts what the queue and the buffer for words have room for, with one doorbell.
bool Lane::post(bool* has_moved) {
  if (!pair_->is_connected()) return false;
  if (!is_proven_ && !is_probing_) {
    is_probing_ = true;
    if (!pair_->post_probe(kProbeId)) return false;
  }
  const auto& reads = plan_->reads();
  const auto& chunks = plan_->chunks();
  requests_.clear();
  sges_.resize(size_t{depth_} * max_pieces_);
  uint64_t n_quiet_bytes = 0;
  while (n_posted_ < reads.size() && n_posted_ - n_arrived_ < depth_) {
    while (chunks[n_chunks_posted_].end_read <= n_posted_) ++n_chunks_posted_;
    if (n_chunks_posted_ >= n_chunks_settled_ + kChunksInFlight) break;
    const PlannedRead& read = reads[n_posted_];
    requests_.push_back(to_request(read, &sges_[requests_.size() * max_pieces_]));
    ++n_posted_;
    n_quiet_bytes += read.nbytes;
    if (read.ends_chunk || n_posted_ - n_signalled_ >= depth_ / 4 || n_quiet_bytes >= kSignalBytes) {
      requests_.back().send_flags |= IBV_SEND_SIGNALED;
      n_signalled_ = n_posted_;
      n_quiet_bytes = 0;
    }
  }
  if (requests_.empty()) return true;
  for (size_t i = 0; i + 1 < requests_.size(); ++i) requests_[i].next = &requests_[i + 1];
  *has_moved = true;
  return pair_->post(requests_.data());
}

ibv_send_wr Lane::to_request(const PlannedRead& read, ibv_sge* sges) const {
  const Registration& memory = read.is_words ? *word_memory_ : batch_->local;
  const uint32_t key = memory.local_key(read.is_words ? 0 : rail_number_);
  for (uint32_t i = 0; i < read.n_pieces; ++i) {
    const Piece& piece = plan_->pieces()[read.first_piece + i];
    sges[i] = {memory.address() + piece.at, piece.nbytes, key};
  }
  ibv_send_wr request{};
  request.wr_id = n_posted_ + 1;  // so many reads have arrived when it has
  request.sg_list = sges;
  request.num_sge = static_cast<int>(read.n_pieces);
  request.opcode = IBV_WR_RDMA_READ;
  request.send_flags = read.is_fenced ? IBV_SEND_FENCE : 0;
  request.wr.rdma.remote_addr = batch_->remote.address + read.remote;
  request.wr.rdma.rkey = batch_->remote.keys[peer_rail_];
  return request;
}

void Lane::ping() {
  asked_at_ = Clock::now();
  is_pinged_ = true;
}

Lane::Progress Lane::listen() {
  if (!is_alive()) return Progress::kLost;
  if (is_connecting()) return is_pinged_ ? Progress::kBlocked : Progress::kDone;
  if (!pair_->is_connected()) return Progress::kLost;
  if (is_pinged_ && !is_probing_) {
    is_probing_ = true;
    if (!pair_->post_probe(kProbeId)) return Progress::kLost;
  }
  bool has_moved = false;
  const Progress progress = take_completions(&has_moved);
  if (progress != Progress::kMoved) return Progress::kLost;
  return is_pinged_ ? Progress::kBlocked : Progress::kDone;
}

std::vector<uint32_t> Lane::unsettled() const {
  std::vector<uint32_t> spans;
  if (!batch_) return spans;
  for (size_t chunk = n_chunks_settled_; chunk < plan_->chunks().size(); ++chunk) {
    const ReadPlan::Chunk& unfinished = plan_->chunks()[chunk];
    for (uint32_t i = 0; i < unfinished.n_expected; ++i) {
      spans.push_back(plan_->expected()[unfinished.first_expected + i].span);
    }
  }
  return spans;
}

void Lane::finish() {
  plan_.reset();
  batch_.reset();
}

void Lane::destroy() {
  pair_.reset();
  loopback_.reset();
}

void Lane::say_good_bye() {
  const bool is_connected = is_alive() && outcome_.valid() && !is_connecting() && pair_->is_connected();
  if (!is_connected || !pair_->post_good_bye(kGoodByeId)) return;
  const Deadline deadline = Deadline::after(kGoodByeS);
  while (!deadline.passed()) {
    completions_->arm();
    ibv_wc completion;
    while (completions_->poll(&completion, 1) > 0) {
      if (completion.wr_id == kGoodByeId || completion.status != IBV_WC_SUCCESS) return;
    }
    pollfd fd{completions_->fd(), POLLIN, 0};
    poll(&fd, 1, deadline.poll_ms());
    completions_->drain();
  }
}

}  // namespace p2pkv::verbs
