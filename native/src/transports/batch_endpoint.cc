#include "transports/batch_endpoint.h"

#include <algorithm>

namespace p2pkv {
namespace {

std::shared_ptr<Transfer> all_settled(size_t n_spans, Status status) {
  return std::make_shared<SettledTransfer>(std::vector<Status>(n_spans, status));
}

}  // namespace

std::string BatchEndpoint::describe() {
  const std::lock_guard lock(mutex_);
  if (half_.empty() && !is_closed_) half_ = make_half();
  return half_;
}

bool BatchEndpoint::bind(std::string_view remote, std::string* error) {
  const std::lock_guard lock(mutex_);
  if (is_bound_ || is_closed_) {
    *error = is_closed_ ? "the endpoint is closed" : "the endpoint is bound already";
    return false;
  }
  if (half_.empty()) half_ = make_half();
  is_bound_ = take_half(remote, error);
  return is_bound_;
}

std::shared_ptr<Transfer> BatchEndpoint::read(std::shared_ptr<MemoryRegion> local,
                                              std::shared_ptr<RemoteRegion> remote, std::vector<Span> spans,
                                              std::vector<Word> words) {
  return post(std::move(local), std::move(remote), {nullptr, std::move(spans), std::move(words), {}, {}});
}

// `reads` without its local memory and statuses.
std::shared_ptr<Transfer> BatchEndpoint::post(std::shared_ptr<MemoryRegion> local,
                                              std::shared_ptr<RemoteRegion> remote, Reads reads) {
  const std::vector<Span>& spans = reads.spans;
  const std::vector<Word>& words = reads.words;
  auto registered = std::dynamic_pointer_cast<RegisteredRegion>(local);
  auto attached = std::dynamic_pointer_cast<AttachedRegion>(remote);
  const bool is_well_formed =
      registered && attached && attached->endpoint == this && (words.empty() || words.size() == spans.size());
  if (!is_well_formed) return all_settled(spans.size(), Status::kOutOfRange);
  std::vector<Status>& statuses = reads.statuses;
  statuses = screen_spans(spans, words, registered->nbytes(), attached->nbytes());

  const bool has_work = std::find(statuses.begin(), statuses.end(), Status::kPending) != statuses.end();
  if (!has_work) return std::make_shared<SettledTransfer>(std::move(statuses));

  std::shared_ptr<Batch> batch;  // it outlives the lock: where an exception ends it, its end takes that again
  const std::lock_guard lock(mutex_);
  const bool is_busy = n_settled_.load(std::memory_order_acquire) != n_posted_;
  Status refusal = Status::kPending;
  if (is_closed_ || is_busy) refusal = Status::kCanceled;
  if (refusal == Status::kPending && (is_severed_ || !is_bound_)) refusal = Status::kPeerLost;
  if (refusal != Status::kPending) {
    for (Status& status : statuses) {
      if (status == Status::kPending) status = refusal;
    }
    return std::make_shared<SettledTransfer>(std::move(statuses));
  }
  reads.local = std::move(registered);
  batch = make_batch(std::move(attached), std::move(reads));
  active_ = batch;
  batch->count_in(&n_settled_);
  ++n_posted_;
  batch->start();
  return batch;
}

void BatchEndpoint::cancel_reads_into(const RegisteredRegion& region) {
  std::shared_ptr<Batch> active;
  uint64_t n_posted = 0;
  {
    const std::lock_guard lock(mutex_);
    active = active_.lock();
    n_posted = n_posted_;
  }
  if (active && active->reads_into(region)) active->settle(Status::kCanceled);
  if (!active) wait_settled(n_posted);
}

// A batch whose last owner lets go of it is found no more, and its end may still be under way.
void BatchEndpoint::wait_settled(uint64_t n_posted) {
  for (;;) {
    const uint64_t n_settled = n_settled_.load(std::memory_order_acquire);
    if (n_settled >= n_posted) return;
    n_settled_.wait(n_settled, std::memory_order_acquire);
  }
}

void BatchEndpoint::sever() {
  if (getpid() != pid_)
    return;  // a forked child shares the sockets: shutting them down would cut its parent off
  const std::lock_guard lock(mutex_);
  if (is_severed_) return;
  is_severed_ = true;
  shutdown_sockets();
}

void BatchEndpoint::close() {
  if (getpid() != pid_) return;
  const std::lock_guard closing(closing_);
  if (is_released_) return;
  std::shared_ptr<Batch> active;
  uint64_t n_posted = 0;
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    active = active_.lock();
    n_posted = n_posted_;
  }
  if (active) active->settle(Status::kCanceled);
  sever();
  wait_settled(n_posted);
  release();
  is_released_ = true;
}

bool EndpointList::add(const std::shared_ptr<Endpoint>& endpoint) {
  const std::lock_guard lock(mutex_);
  std::erase_if(endpoints_, [](const auto& known) { return known.expired(); });
  if (is_closed_) return false;
  endpoints_.push_back(endpoint);
  return true;
}

std::vector<std::shared_ptr<Endpoint>> EndpointList::all() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Endpoint>> endpoints;
  for (auto& known : endpoints_) {
    if (auto endpoint = known.lock()) endpoints.push_back(std::move(endpoint));
  }
  return endpoints;
}

void EndpointList::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
  }
  for (auto& endpoint : all()) endpoint->close();
}

}  // namespace p2pkv
