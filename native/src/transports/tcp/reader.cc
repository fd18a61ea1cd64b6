#include "transports/tcp/reader.h"

#include <poll.h>

#include <algorithm>
#include <cstring>

namespace p2pkv::tcp {
namespace {

// Below this, waking a helper costs more than its stream brings (a guess from wake-ups of 50 us at 4 GB/s).
constexpr uint64_t kSpreadFromBytes = 1 << 20;
// Steps of one done(), so that it does not block for long; each moves at most what a socket buffer holds.
constexpr int kStepsPerPoll = 8;

}  // namespace

bool Helper::start() {
  return thread_.start("p2pkv-tcp-read", [this] { run(); });
}

void Helper::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
    given_.notify_all();
  }
  thread_.join();
}

void Helper::give(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  task_ = std::move(task);
  given_.notify_all();
}

void Helper::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    given_.wait(lock, [this] { return is_closing_ || task_; });
    if (!task_) return;
    const auto task = std::exchange(task_, nullptr);
    lock.unlock();
    task();
    lock.lock();
  }
}

std::string make_blob(Server& server, uint32_t n_streams, uint32_t n_tokens, uint64_t grant) {
  const Address& address = server.address();
  EndpointBlob blob{};
  blob.magic = kEndpointMagic;
  blob.version = kFrameVersion;
  blob.port = address.port;
  blob.family = address.family;
  blob.scope = address.scope;
  blob.n_streams = static_cast<uint8_t>(n_streams);
  blob.n_tokens = static_cast<uint8_t>(n_tokens);
  std::memcpy(blob.address, address.bytes, sizeof blob.address);
  std::string result = to_blob(blob);
  for (uint32_t i = 0; i < n_tokens; ++i) result += to_blob(server.tokens().mint(grant));
  return result;
}

TcpEndpoint::TcpEndpoint(TcpHome home) : home_(std::move(home)), grant_(home_.server->tokens().new_grant()) {}

std::string TcpEndpoint::make_half() {
  return make_blob(*home_.server, home_.n_streams, home_.n_streams, grant_);
}

bool TcpEndpoint::take_half(std::string_view remote, std::string* error) {
  EndpointBlob owner;
  if (!from_blob(remote, kEndpointMagic, &owner, error)) return false;
  const bool is_sane = (owner.family == 4 || owner.family == 6) && owner.n_tokens > 0 &&
                       remote.size() == sizeof owner + owner.n_tokens * sizeof(Token);
  if (!is_sane) {
    *error = "handshake is malformed";
    return false;
  }
  Address address{owner.family, owner.port, owner.scope, {}};
  std::memcpy(address.bytes, owner.address, sizeof address.bytes);
  streams_.resize(std::min<size_t>(home_.n_streams, owner.n_tokens));
  for (size_t i = 0; i < streams_.size(); ++i) {
    Token token;
    std::memcpy(token.data(), remote.data() + sizeof owner + i * sizeof token, sizeof token);
    streams_[i].connect(address, token);
  }
  return true;
}

std::shared_ptr<RemoteRegion> TcpEndpoint::attach(std::string_view region, std::string* error) {
  RegionBlob blob;
  if (!from_blob(region, kRegionMagic, &blob, error)) return nullptr;
  return std::make_shared<AttachedRegion>(this, blob.region, blob.nbytes);
}

std::shared_ptr<Batch> TcpEndpoint::make_batch(std::shared_ptr<AttachedRegion> remote, Reads reads) {
  return std::make_shared<TcpBatch>(std::static_pointer_cast<TcpEndpoint>(shared_from_this()),
                                    std::move(remote), std::move(reads));
}

void TcpEndpoint::shutdown_sockets() {
  for (Stream& stream : streams_) stream.shut_down();
}

void TcpEndpoint::release() {
  home_.server->drop_grant(grant_);
  helpers_.clear();
  const std::lock_guard lock(mutex_);
  for (Stream& stream : streams_) stream.reset();
}

TcpBatch::TcpBatch(std::shared_ptr<TcpEndpoint> endpoint, std::shared_ptr<AttachedRegion> remote, Reads reads)
    : Batch(std::move(reads)), endpoint_(std::move(endpoint)), remote_(std::move(remote)) {}

void TcpBatch::start() {
  auto& streams = endpoint_->streams_;
  auto& helpers = endpoint_->helpers_;
  const uint64_t n_bytes = n_pending_bytes(spans_, statuses_);
  if (n_bytes >= kSpreadFromBytes) {
    while (helpers.size() + 1 < streams.size()) {
      ThreadOwner<Helper> helper(new Helper);
      if (!helper->start()) break;
      helpers.push_back(std::move(helper));
    }
  }
  const size_t n_shares = n_bytes >= kSpreadFromBytes ? helpers.size() + 1 : 1;
  auto shares = split_spans(spans_, words_, statuses_, n_shares);
  const ReadPlan plan{local_.get(), remote_->id, &spans_, &words_, &statuses_};
  for (size_t i = 0; i < shares.size(); ++i) streams[i].begin(plan, std::move(shares[i]));
  for (size_t i = shares.size(); i < streams.size(); ++i) streams[i].flush();
  for (size_t i = 1; i < shares.size(); ++i) {
    // counted one by one: the batch's end waits for helpers that were given something, and for no others
    std::function<void()> task = [this, stream = &streams[i]] { help(*stream); };
    {
      const std::lock_guard lock(helpers_mutex_);
      ++n_helping_;
    }
    helpers[i - 1]->give(std::move(task));
  }
}

bool TcpBatch::drive(const Deadline* deadline) {
  if (!is_own_done_ && !drive_own_stream(deadline)) return false;
  is_own_done_ = true;
  std::unique_lock lock(helpers_mutex_);
  const auto are_done = [this] { return n_helping_ == 0; };
  // Helpers end soon after an abort, so this needs no waking for it.
  if (deadline) helpers_done_.wait_until(lock, deadline->at(), are_done);
  return are_done() && !is_aborted();
}

bool TcpBatch::drive_own_stream(const Deadline* deadline) {
  Stream& stream = endpoint_->streams_[0];
  for (int step = 0; !is_aborted(); ++step) {
    const Stream::Progress progress = stream.advance();
    if (progress == Stream::Progress::kDone) return true;
    if (progress == Stream::Progress::kLost || progress == Stream::Progress::kLocalClosed) {
      give_up(progress);
      return false;
    }
    if (deadline ? deadline->passed() : step == kStepsPerPoll) return false;
    if (progress == Stream::Progress::kBlocked) {
      if (!deadline) return false;
      pollfd fd{stream.fd(), stream.events(), 0};
      poll(&fd, 1, deadline->poll_ms());
    }
  }
  return false;
}

void TcpBatch::help(Stream& stream) {
  while (!is_aborted()) {
    const Stream::Progress progress = stream.advance();
    if (progress == Stream::Progress::kDone) break;
    if (progress == Stream::Progress::kBlocked) {
      // Without a deadline: what ends the batch also shuts the socket down, and that wakes this.
      pollfd fd{stream.fd(), stream.events(), 0};
      poll(&fd, 1, -1);
    } else if (progress != Stream::Progress::kMoved) {
      give_up(progress);
    }
  }
  const std::lock_guard lock(helpers_mutex_);
  --n_helping_;
  helpers_done_.notify_all();
}

void TcpBatch::give_up(Stream::Progress why) {
  abort(why == Stream::Progress::kLocalClosed ? Status::kCanceled : Status::kPeerLost);
}

void TcpBatch::quiesce() {
  std::unique_lock lock(helpers_mutex_);
  helpers_done_.wait(lock, [this] { return n_helping_ == 0; });
}

}  // namespace p2pkv::tcp
